"""Proofs that the process which holds the lease is dead: only the kernel's word counts, its own or that of its host.

| where the holder runs | proof |
|---|---|
| in our pid namespace | its process descriptor says that it has ended, or its pid is nobody's or another's |
| elsewhere, and `ha.peers_direct` | its lifeline was cut, and two fresh connections in a row were refused |
| elsewhere | none: the lease must run out |

A time-out, an unreachable host or a reset alone prove nothing: a paused, hung or cut-off router looks the same and may
come back. Source: ha.md, 2.8, rule C; pidfd_open(2).
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import select

import aiohttp

from narwhal.core.lease import LeaseRecord, ProcessIdentity
from narwhal.ha.identity import boot_id, pid_namespace, start_ticks

LIFELINE = "/ha/lifeline"
RECONNECT_S = 0.25
"""Wait between two attempts to hold a lifeline."""
REFUSALS = 2
REFUSED_AGAIN_S = 0.01
CONNECT_S = 0.5
FIRST_LINE_BYTES_MAX = 4096


class DeathWatch:
    """The `HolderWatch` of `narwhal.ports`. `peers_direct` is the setting `ha.peers_direct`."""

    def __init__(self, *, peers_direct: bool) -> None:
        self._peers_direct = peers_direct
        self._session: aiohttp.ClientSession | None = None

    async def death(self, holder: LeaseRecord) -> str:
        """Return the proof that the process of `holder` is dead, once there is one."""
        if _lives_here(holder.process):
            await _ended(holder.process)
            return f"process {holder.process.pid} on this host has ended"
        if self._peers_direct:
            await self._cut_off(holder)
            return f"its lifeline was cut and {holder.url} refuses connections"
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")

    async def aclose(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    async def _cut_off(self, holder: LeaseRecord) -> None:
        """Return when a lifeline that was held has been cut and the address refuses connections.

        Once cut it is remembered: a dying listener may still take a connection or two before it refuses.
        """
        was_held = False
        while True:
            was_held = await self._hold_lifeline(holder) or was_held
            if was_held and await self._refused(holder.url):
                return
            await asyncio.sleep(RECONNECT_S if not was_held else REFUSED_AGAIN_S)

    async def _hold_lifeline(self, holder: LeaseRecord) -> bool:
        """Hold a connection to exactly the process of `holder` until it ends; return whether there was one."""
        greeted = False
        try:
            async with self._open().get(holder.url + LIFELINE) as answer:
                greeted = _incarnation(await answer.content.readline()) == holder.incarnation
                while greeted and await answer.content.readany():
                    pass
        except (aiohttp.ClientError, ValueError):
            pass
        return greeted

    async def _refused(self, url: str) -> bool:
        """Whether the address refuses two fresh connections in a row; anything else, a time-out too, is no refusal."""
        for attempt in range(REFUSALS):
            if attempt:
                await asyncio.sleep(REFUSED_AGAIN_S)
            try:
                async with self._open().get(url + LIFELINE):
                    return False
            except aiohttp.ClientConnectorError as error:
                if error.os_error.errno != errno.ECONNREFUSED:
                    return False
            except aiohttp.ClientError:
                return False
        return True

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=None),
                read_bufsize=FIRST_LINE_BYTES_MAX,
                trust_env=False,
            )
        return self._session


def _incarnation(line: bytes) -> object:
    """Return the incarnation that a lifeline's first line names. Raises ValueError."""
    greeting = json.loads(line)
    return greeting.get("incarnation") if isinstance(greeting, dict) else None


def _lives_here(process: ProcessIdentity) -> bool:
    """Whether `process`, dead or alive, is one of our own pid namespace, so that its pid means the same here."""
    told = process.boot_id and process.pid_namespace and process.start_ticks and hasattr(os, "pidfd_open")
    return bool(told) and (process.boot_id, process.pid_namespace) == (boot_id(), pid_namespace())


async def _ended(process: ProcessIdentity) -> None:
    """Return when exactly `process` has ended; never, when it cannot be told from another one of that pid."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except OSError:
        await asyncio.Event().wait()
        return
    try:
        started = start_ticks(process.pid)
        if started is None and not _has_ended(descriptor):
            await asyncio.Event().wait()
        if started == process.start_ticks:
            await _readable(descriptor)
    finally:
        os.close(descriptor)


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


async def _readable(descriptor: int) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
