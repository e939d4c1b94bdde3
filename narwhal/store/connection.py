"""One purpose's way to Redis: short bounded commands, no hidden retries, errors translated where they arise.

redis-py's defaults are unusable for a lease (ten retries of commands that may have taken place, five seconds each), so
everything that waits or repeats is set here. Source: ha.md, 2.7 and 5; decision 36.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from narwhal.errors import ConfigError
from narwhal.store.scripts import Script
from narwhal.store.trouble import translate

Reply: TypeAlias = "bytes | int | list[Reply] | None"
Argument: TypeAlias = str | bytes | int | float

CONNECTIONS_MAX: Final = 16
URL_OPTIONS: Final = frozenset(
    {"db", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}
)


class RedisLink:
    """Commands to one Redis for one purpose, each bounded by a wall time.

    A command that times out or is cancelled takes its connection with it, so that a late answer can never be read as
    the answer to a later command.
    """

    def __init__(self, client: Redis, *, address: str, op_timeout_s: float, script_flags: bool = True) -> None:
        self.address = address
        self.op_timeout_s = op_timeout_s
        self._client = client
        self._script_flags = script_flags
        client.response_callbacks.clear()

    async def run(self, *command: Argument, what: str = "", cap_s: float | None = None) -> Reply:
        """Return the raw answer to `command`.

        `cap_s` (default `op_timeout_s`) bounds all of it, connecting included. Raises StoreUnavailable, StoreMisused.
        """
        return await self._bounded(lambda: self._execute(*command), what=what or str(command[0]), cap_s=cap_s)

    async def call(self, script: Script, *, keys: Sequence[str], args: Sequence[Argument] = ()) -> Reply:
        """Return the answer of `script`, sending its text only when the server does not know it yet.

        Raises StoreUnavailable, StoreMisused.
        """
        if not self._script_flags:
            script = script.without_flags()
        return await self._bounded(lambda: self._evaluate(script, (len(keys), *keys, *args)), what=script.name)

    async def aclose(self) -> None:
        """Close every connection; commands under way fail."""
        await self._client.aclose()

    async def _bounded(
        self, command: Callable[[], Awaitable[Reply]], *, what: str, cap_s: float | None = None
    ) -> Reply:
        cap_s = self.op_timeout_s if cap_s is None else cap_s
        task = asyncio.current_task()
        assert task is not None, "a command runs in a task"
        cancelled_before = task.cancelling()
        try:
            async with asyncio.timeout(cap_s):
                return await command()
        except (RedisError, OSError) as error:
            raise translate(error, what=what, address=self.address, cap_s=cap_s) from error
        finally:
            # redis-py writes under asyncio.wait_for, which before Python 3.12 may swallow a cancellation.
            if task.cancelling() > cancelled_before:
                raise asyncio.CancelledError

    async def _evaluate(self, script: Script, args: Sequence[Argument]) -> Reply:
        try:
            return await self._execute("EVALSHA", script.sha, *args)
        except NoScriptError:
            return await self._execute("EVAL", script.text, *args)

    async def _execute(self, *command: Argument) -> Reply:
        reply: Reply = await self._client.execute_command(*command)  # type: ignore[no-untyped-call]
        return reply


def connect(
    url: str, *, timeout_s: float, client_name: str, username: str | None = None, password: str | None = None
) -> Redis:
    """Return a client for `url` that has not connected yet; see `CONNECTIONS_MAX`.

    `timeout_s` bounds connecting and every single read and write. `username` wins over one in `url`.
    """
    options: dict[str, Any] = dict(parse_url(checked_url(url)))
    options.update(
        username=username or options.get("username"),
        password=password,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        protocol=2,
        client_name=client_name,
        driver_info=None,
        max_connections=CONNECTIONS_MAX,
    )
    return Redis.from_pool(ConnectionPool(**options))


def checked_url(url: str) -> str:
    """Return `url`; raise ConfigError when it carries what it must not or names no database that can exist."""
    parts = urlsplit(url)
    problems = []
    if parts.scheme not in ("redis", "rediss", "unix"):
        problems.append(f"ha.redis_url: must start with redis://, rediss:// or unix://, not {parts.scheme!r}")
    if parts.password:
        problems.append("ha.redis_url: must not carry a password; set NARWHAL_REDIS_PASSWORD instead")
    if parts.scheme in ("redis", "rediss") and not parts.path.strip("/").isdecimal() and parts.path.strip("/"):
        problems.append(f"ha.redis_url: the path is the number of the database, not {parts.path!r}")
    if parts.scheme == "unix" and not parts.path:
        problems.append("ha.redis_url: unix:// needs the path of the socket, e.g. unix:///run/redis/redis.sock")
    problems += [
        f"ha.redis_url: option {name!r} is not one of {', '.join(sorted(URL_OPTIONS))}"
        for name in parse_qs(parts.query, keep_blank_values=True)
        if name not in URL_OPTIONS
    ]
    if problems:
        raise ConfigError(problems)
    return url


def spoken_address(url: str) -> str:
    """Return `url` for messages: without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
