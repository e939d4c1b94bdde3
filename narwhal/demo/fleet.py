"""The running demo: Redis, engines and two routers as processes, started again when they end, and all ended at last.

A router that is killed comes back after a little more than a lease, as a service manager would bring it back; so the
pair re-forms.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp

from narwhal.config import HaSection
from narwhal.demo.children import Child, how_it_ended
from narwhal.demo.plan import STUB_MODEL, DemoOptions, Plan, PlannedEngine, PlannedRouter, make_plan, render_config
from narwhal.demo.redis_server import RedisServer
from narwhal.errors import NarwhalError, StoreMisused, StoreUnavailable
from narwhal.store.keys import Keys
from narwhal.store.opening import RedisStores, open_redis

OWN_CLUSTER: Final = "demo"
START_TIMEOUT_S: Final = 60.0
ROUTER_STOP_S: Final = 15.0
ENGINE_STOP_S: Final = 5.0
RESTART_PAUSE_S: Final = 1.0
CRASH_LOOP: Final = 5
QUICK_S: Final = 5.0

Say = Callable[[str], None]


class DemoFailed(NarwhalError):
    """The demo could not be brought up or kept up; the message says what ended and its last words."""


class Fleet:
    """Starts everything, keeps it running, ends everything. `say` tells people what happens."""

    def __init__(self, options: DemoOptions, *, say: Say) -> None:
        self.options = options
        self.redis: RedisServer | None = None
        self.children: dict[str, Child] = {}
        self._say = say
        self._given_folder = options.state_dir is not None
        self._folder: Path | None = None
        self._plan: Plan | None = None
        self._whole = False
        self._keepers: list[asyncio.Task[None]] = []
        self._stores: RedisStores | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def plan(self) -> Plan:
        """What was started."""
        assert self._plan is not None, "start the fleet first"
        return self._plan

    @property
    def folder(self) -> Path:
        """Where configuration, state and logs are."""
        assert self._folder is not None, "start the fleet first"
        return self._folder

    @property
    def redis_url(self) -> str:
        """The Redis that the pair shares."""
        if self.options.redis_url is not None:
            return self.options.redis_url
        assert self.redis is not None, "start the fleet first"
        return self.redis.url

    @property
    def stores(self) -> RedisStores:
        """Our own look into the pair's Redis."""
        assert self._stores is not None, "start the fleet first"
        return self._stores

    @property
    def restart_after_s(self) -> float:
        """How long a router stays away after it ended."""
        return self.options.lease_ttl_s + RESTART_PAUSE_S

    async def start(self) -> None:
        """Start every process and return; `wait_until_whole` waits for the pair.

        Raises NarwhalError: no port, no Redis, no answer from an engine of yours.
        """
        own = self.options.redis_url is None
        cluster = OWN_CLUSTER if own else f"{OWN_CLUSTER}-{secrets.token_hex(4)}"
        self._folder = self._make_folder()
        models = await _models_of(self.options) if self.options.engines else (STUB_MODEL,)
        self._plan = make_plan(self.options, folder=self._folder, cluster=cluster, models=models)
        if self._plan.remark is not None:
            self._say(self._plan.remark)
        if own:
            self.redis = RedisServer.start(port=self._plan.ports.redis)
        self._write_configs()
        if not own:
            await self.stores.lease.observe()
        for engine in self._plan.engines:
            if engine.admin_url is not None:
                self._run(engine.id, _stub_command(engine, itl_ms=self.options.itl_ms), pause_s=RESTART_PAUSE_S)
        for router in self._plan.routers:
            self._run(router.id, _router_command(router), pause_s=self.restart_after_s)

    async def wait_until_whole(self, *, timeout_s: float = START_TIMEOUT_S) -> PlannedRouter:
        """Return the router that serves, once the other one is a warm standby. Raises DemoFailed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        async with aiohttp.ClientSession(trust_env=False) as session:
            while True:
                looks = await asyncio.gather(*(look_at(session, router.url) for router in self.plan.routers))
                serving = [r for r, (status, _) in zip(self.plan.routers, looks, strict=True) if status == 200]
                warm = [document for status, document in looks if status == 503 and document.get("reason") == "standby"]
                if len(serving) == 1 and warm:
                    self._whole = True
                    return serving[0]
                if self.failed.done():
                    raise DemoFailed(self.failed.result())
                if loop.time() > deadline:
                    told = "; ".join(
                        f"{router.id} says {document.get('reason') or 'nothing'}"
                        for router, (_, document) in zip(self.plan.routers, looks, strict=True)
                    )
                    raise DemoFailed(f"no pair after {timeout_s:g} s: {told}; the logs are in {self.folder}")
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End every process, routers first, and remove what was made. Safe to call twice."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()
        routers = [child for name, child in self.children.items() if name in self._router_names()]
        engines = [child for name, child in self.children.items() if name not in self._router_names()]
        await asyncio.gather(*(child.stop(timeout_s=ROUTER_STOP_S) for child in routers))
        await asyncio.gather(*(child.stop(timeout_s=ENGINE_STOP_S) for child in engines))
        await self._leave_redis()
        if self._folder is not None and not self._given_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def hurry(self) -> None:
        """End every process at once; `stop` then has nothing to wait for."""
        for child in self.children.values():
            if child.starts:
                child.kill()

    def _router_names(self) -> set[str]:
        return {router.id for router in self._plan.routers} if self._plan is not None else set()

    def _make_folder(self) -> Path:
        if self.options.state_dir is None:
            return Path(tempfile.mkdtemp(prefix="narwhal-demo-"))
        try:
            self.options.state_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DemoFailed(f"--state-dir {self.options.state_dir} cannot be made: {error.strerror}") from error
        return self.options.state_dir.resolve()

    def _write_configs(self) -> None:
        for router in self.plan.routers:
            text = render_config(
                self.plan,
                router,
                redis_url=self.redis_url,
                lease_ttl_s=self.options.lease_ttl_s,
                folder=self.folder,
            )
            router.config_file.write_text(text)
        self._stores = open_redis(
            HaSection(cluster=self.plan.cluster, redis_url=self.redis_url).model_copy(update={"op_timeout_s": 2.0}),
            client_name="narwhal-demo",
            username=os.environ.get("NARWHAL_REDIS_USERNAME") or None,
            password=os.environ.get("NARWHAL_REDIS_PASSWORD") or None,
        )

    def _run(self, name: str, command: list[str], *, pause_s: float) -> None:
        child = Child(name, command, log=self.folder / f"{name}.log", environ=_environ(os.environ))
        self.children[name] = child
        child.start()
        self._keepers.append(asyncio.create_task(self._keep(child, pause_s), name=f"keep-{name}"))

    async def _keep(self, child: Child, pause_s: float) -> None:
        """Start `child` again whenever it ends by itself; give up on one that cannot stay up."""
        loop = asyncio.get_running_loop()
        quick_ends = 0
        while True:
            started_at = loop.time()
            code = await child.ended()
            if child.stopping:
                return
            quick_ends = quick_ends + 1 if loop.time() - started_at < QUICK_S else 0
            told = f"{child.name} (process {child.pid}) ended: {how_it_ended(code)}"
            if code >= 0 and (not self._whole or quick_ends >= CRASH_LOOP):
                if not self.failed.done():
                    self.failed.set_result(f"{told}. Its last words in {child.log}:\n{child.last_words()}")
                return
            self._say(f"{told}; starting it again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            child.start()
            self._say(f"{child.name} runs again as process {child.pid}")

    async def _leave_redis(self) -> None:
        if self._stores is not None:
            if self.redis is None and self._plan is not None and self.children:
                await self._forget(self._stores, self._plan)
            await self._stores.aclose()
            self._stores = None
        if self.redis is not None:
            self.redis.stop()

    async def _forget(self, stores: RedisStores, plan: Plan) -> None:
        """Remove the demo's keys from a Redis that is not ours."""
        keys = Keys.of(plan.cluster)
        names = [keys.lease, keys.token, keys.epoch, keys.claim, keys.release, keys.handoff, keys.events, keys.members]
        names += [keys.member(router.id) for router in plan.routers]
        try:
            await stores.control.run("UNLINK", *names)
        except (StoreUnavailable, StoreMisused) as error:
            self._say(f"the keys narwhal:{{{plan.cluster}}}:* stay in Redis: {error}")


async def look_at(session: aiohttp.ClientSession, url: str, *, timeout_s: float = 1.0) -> tuple[int, dict[str, Any]]:
    """Return status and document of a router's /ready; 0 and an empty one when it gives no readable answer."""
    try:
        async with asyncio.timeout(timeout_s), session.get(f"{url}/ready", allow_redirects=False) as answer:
            return answer.status, dict(await answer.json(content_type=None))
    except (aiohttp.ClientError, TimeoutError, ValueError, TypeError):
        return 0, {}


async def _models_of(options: DemoOptions) -> tuple[str, ...]:
    """Return the models that every real engine offers. Raises DemoFailed naming the engine that is the trouble."""
    offered: list[list[str]] = []
    async with aiohttp.ClientSession(trust_env=False, timeout=aiohttp.ClientTimeout(total=10.0)) as session:
        for engine in options.engines:
            try:
                async with session.get(f"{engine.url}/v1/models") as answer:
                    answer.raise_for_status()
                    offered.append([str(card["id"]) for card in (await answer.json(content_type=None))["data"]])
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
                raise DemoFailed(
                    f"{engine.role} engine {engine.url} does not tell its models: {str(error) or type(error).__name__}"
                ) from error
    common = [model for model in offered[0] if all(model in models for models in offered)]
    if not common:
        raise DemoFailed(f"the engines have no model in common: {'; '.join(', '.join(models) for models in offered)}")
    return tuple(common)


def _stub_command(engine: PlannedEngine, *, itl_ms: float) -> list[str]:
    return [
        *(sys.executable, "-m", "narwhal", "stub-engine", "--role", engine.role, "--model", STUB_MODEL),
        *("--port", str(engine.port), "--admin-port", str(engine.admin_port), "--itl", f"{itl_ms:g}"),
    ]


def _router_command(router: PlannedRouter) -> list[str]:
    """Return how the router is started: by the installed `narwhal-serve`, or through the package without one."""
    installed = Path(sys.executable).with_name("narwhal-serve")
    serve = [str(installed)] if installed.exists() else [sys.executable, "-m", "narwhal", "serve"]
    return [*serve, "--config", str(router.config_file)]


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what would override the settings that the demo has just written."""
    return {
        name: value
        for name, value in environ.items()
        if not (name.startswith("NARWHAL_") and ("__" in name or name in ("NARWHAL_ENGINES", "NARWHAL_PEERS")))
    }
