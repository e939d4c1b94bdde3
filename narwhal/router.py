"""The composition root: builds the drivers, wires them to one control plane, and runs them until it is told to stop.

Here, and only here, the lease clock (CLOCK_BOOTTIME) and the wall clock enter. No decision is made in this module.
"""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import structlog
import uvloop

from narwhal import __version__
from narwhal.config import Config
from narwhal.core.control_plane import ControlPlane
from narwhal.core.handoff import HANDOFF_SCHEMA_VERSION, configured_engine_set
from narwhal.core.lease import LeaseRecord
from narwhal.core.vocabulary import FencingToken, RouterId, RouterRole
from narwhal.engine.client import EngineClient
from narwhal.errors import HandoffRejected, NarwhalError
from narwhal.ha.announcer import announce_forever
from narwhal.ha.death_watch import DeathWatch
from narwhal.ha.follower import Follower
from narwhal.ha.identity import own_identity
from narwhal.ha.keeper import LeaseKeeper
from narwhal.ha.life import RouterLife
from narwhal.ha.lookout import Lookout
from narwhal.ha.meters import HaMeters, MeteredHandoffStore, MeteredLeaseStore, MeteredPeer
from narwhal.ha.peer import HttpRouterPeer
from narwhal.ha.standby import Standby, StandbyOptions
from narwhal.monitor.handoff_writer import HandoffWriter
from narwhal.monitor.loop import MonitorLoop
from narwhal.monitor.probe_runner import ProbeRunner
from narwhal.monitor.readmission_runner import ReadmissionRunner
from narwhal.monitor.reporter import Reporter
from narwhal.monitor.stages import Stages
from narwhal.ports import Member
from narwhal.serving.admin import AdminDeps, build_admin_app
from narwhal.serving.app import ServingDeps, build_app
from narwhal.serving.lifeline import Lifeline
from narwhal.serving.metrics import Metrics
from narwhal.serving.server import HttpServer
from narwhal.store.file_store import FileHandoffStore
from narwhal.store.ha_record import HaRecord
from narwhal.store.opening import RedisStores, check_when_reachable, open_redis
from narwhal.store.state_lock import lock_state

log = structlog.get_logger()

PATIENCE_IN_TTLS = 5
EXIT_OK = 0
EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `narwhal-serve` was told beside the configuration file; secrets come from the environment."""

    role: Literal["auto", "active", "standby"] = "auto"
    resume: bool = False
    fresh: bool = False
    solo: bool = False
    redis_username: str | None = None
    redis_password: str | None = None
    admin_token: str | None = None


def run(config: Config, options: ServeOptions) -> int:
    """Run one router until SIGTERM or SIGINT and return its exit code."""
    return uvloop.run(_serve(config, options))


async def _serve(config: Config, options: ServeOptions) -> int:
    structlog.contextvars.bind_contextvars(router=config.router.id, cluster=config.ha.cluster)
    folder = Path(config.router.state_dir) / config.router.id
    try:
        with lock_state(folder):
            return await Router(config, options, folder).run()
    except NarwhalError as error:
        log.critical("router_not_started", error=str(error))
        return EXIT_FAILED


class Router:
    """Every driver of one router, built once, run once."""

    def __init__(self, config: Config, options: ServeOptions, folder: Path) -> None:
        self._config = config
        self._options = options
        self._incarnation = uuid.uuid4().hex[:12]
        self._stop = asyncio.Event()
        self._plane = ControlPlane(config)
        self._engines = EngineClient(config)
        self._metrics = Metrics(self._plane, clock=lease_clock)
        self._meters = HaMeters(self._plane, self._metrics.registry, clock=lease_clock)
        self._file = FileHandoffStore(folder / "handoff.json")
        self._tokens = HaRecord(folder / "ha.json")
        self._stores = None if options.solo else self._open_stores()
        self._build_monitor()
        self._follower = Follower(
            self._plane, file=self._file, mirror=self._stores.handoff if self._stores else self._file
        )
        self._build_life()

    def _open_stores(self) -> RedisStores:
        return open_redis(
            self._config.ha,
            client_name=f"narwhal-{self._config.router.id}",
            username=self._options.redis_username,
            password=self._options.redis_password,
        )

    def _build_monitor(self) -> None:
        plane = self._plane
        probes = ProbeRunner(plane, self._engines.control)
        self._probes = probes
        self._reporter = Reporter(plane, start_probe=probes.start)
        probes.report = self._reporter.report
        readmission = ReadmissionRunner(plane, self._engines.control, self._reporter.report)
        self._writer = HandoffWriter(
            plane,
            file=MeteredHandoffStore(self._file, self._meters, target="file"),
            mirror=MeteredHandoffStore(self._stores.handoff, self._meters, target="mirror") if self._stores else None,
            clock=lease_clock,
            wall=wall_clock,
        )
        self._stages = Stages(plane, self._engines.control, self._reporter, readmission, self._writer)
        self._monitor = MonitorLoop(plane, self._stages, self._reporter)

    def _build_life(self) -> None:
        self._life: RouterLife | None = None
        self._peer = HttpRouterPeer()
        self._death_watch = DeathWatch(peers_direct=self._config.ha.peers_direct)
        if self._stores is None:
            return
        lease = MeteredLeaseStore(self._stores.lease, self._meters)
        self._keeper = LeaseKeeper(self._plane, lease, ha=self._config.ha, clock=lease_clock)
        standby = Standby(
            self._plane,
            store=lease,
            keeper=self._keeper,
            follower=self._follower,
            lookout=Lookout(
                RouterId(self._config.router.id),
                self._config.ha,
                peer=MeteredPeer(self._peer, self._meters),
                holder_watch=self._death_watch,
            ),
            could_serve=self._stages.could_serve,
        )
        self._life = RouterLife(
            self._plane,
            standby=standby,
            keeper=self._keeper,
            tokens=self._tokens,
            write_handoff=self._writer.write,
            took=self._meters.took,
        )

    async def run(self) -> int:
        """Listen, live, and end in the order that costs clients least. Returns the exit code."""
        self._listen_to_signals()
        await self._start_listening()
        life = asyncio.create_task(self._live(), name="life")
        others = [asyncio.create_task(self._monitor.run(), name="monitor")]
        if self._stores is not None:
            others.append(asyncio.create_task(announce_forever(self._stores.lease, self._member), name="announcer"))
            others.append(asyncio.create_task(self._check_redis(self._stores), name="redis-check"))
        exit_code = await self._until_stopped({life, *others})
        await _cancel(life)
        if self._life is not None:
            await self._life.step_down()
        self._plane.stopping = True
        await self._traffic.finish(timeout_s=self._config.serving.graceful_timeout_s, hurry=self._hurry)
        await _cancel(*others)
        await self._close()
        log.info("router_stopped", exit_code=exit_code)
        return exit_code

    async def _until_stopped(self, work: set[asyncio.Task[None]]) -> int:
        """Return 0 when told to stop, 1 when something that must run for ever has crashed."""
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            while True:
                done, _ = await asyncio.wait({stopped, *work}, return_when=asyncio.FIRST_COMPLETED)
                if stopped in done:
                    return EXIT_OK
                for task in done:
                    work.discard(task)
                    if (error := task.exception()) is not None:
                        log.critical("router_crashed", task=task.get_name(), exc_info=error)
                        return EXIT_FAILED
        finally:
            await _cancel(stopped)

    async def _live(self) -> None:
        if self._options.resume:
            await self._resume()
        if self._life is None:
            self._plane.tenure.solo()
            self._plane.role = RouterRole.SOLO
            self._plane.ineligible = None
            log.warning("running_solo", consequence="no lease, no standby: when this process ends the fleet is dark")
            return
        ttls = PATIENCE_IN_TTLS if self._options.role == "standby" else 0
        patience_s = ttls * self._config.ha.lease_ttl_s
        await self._life.run(self._candidate(), StandbyOptions(patience_s=patience_s, fresh=self._options.fresh))

    async def _resume(self) -> None:
        """Apply the saved handoff, or keep it beside and refuse to go on: never start afresh by accident."""
        await self._follower.resume_from_file()
        if (why := self._follower.rejected) is not None:
            kept = await self._file.reject()
            raise HandoffRejected([f"--resume: {why}; kept as {kept}; start with --fresh to leave it behind"])
        log.info("handoff_resumed", version=self._plane.version)

    def _candidate(self) -> LeaseRecord:
        config = self._config
        return LeaseRecord(
            router=RouterId(config.router.id),
            incarnation=self._incarnation,
            token=FencingToken(0),
            ttl_ms=round(config.ha.lease_ttl_s * 1000),
            url=self._url,
            admin_url=self._admin_url,
            engine_set=configured_engine_set(config.engines),
            schema=HANDOFF_SCHEMA_VERSION,
            version=__version__,
            process=own_identity(),
        )

    def _member(self) -> Member:
        plane = self._plane
        return Member(
            router=RouterId(self._config.router.id),
            incarnation=self._incarnation,
            url=self._url,
            admin_url=self._admin_url,
            role=plane.role,
            engine_set=configured_engine_set(self._config.engines),
            handoff=self._follower.applied if not plane.serving else (plane.tenure.token, plane.version),
            eligible=plane.serving or plane.ineligible is None,
            reason=plane.ineligible or "",
            version=__version__,
        )

    async def _check_redis(self, stores: RedisStores) -> None:
        """Log once what is wrong with this Redis, as soon as it answers."""
        findings = await check_when_reachable(stores)
        for finding in findings:
            write = log.error if finding.severity == "error" else log.warning
            write("redis_unfit" if finding.severity == "error" else "redis_remark", finding=finding.text)

    async def _start_listening(self) -> None:
        router = self._config.router
        self._metrics.watch_pool(self._engines.data)
        self._reporter.watch(self._metrics.decision_made)
        traffic = build_app(self._serving_deps())
        admin = build_admin_app(self._admin_deps())
        self._traffic = HttpServer(traffic, host=router.host, port=router.port)
        self._admin = HttpServer(admin, host=router.admin_host, port=router.admin_port)
        port, admin_port = await self._traffic.start(), await self._admin.start()
        self._url = router.advertise_url or f"http://{router.host}:{port}"
        self._admin_url = router.advertise_admin_url or f"http://{router.admin_host}:{admin_port}"
        log.info("router_listening", url=self._url, admin_url=self._admin_url, version=__version__)

    def _serving_deps(self) -> ServingDeps:
        return ServingDeps(
            plane=self._plane,
            engines=self._engines.data,
            report=self._reporter.report,
            clock=lease_clock,
            metrics=self._metrics,
            lifeline=Lifeline(router=self._config.router.id, incarnation=self._incarnation),
            model_cards=self._stages.model_cards,
            on_stale_token=self._overtaken,
        )

    def _overtaken(self) -> None:
        """An engine has served a newer router: the lease is somebody else's, whatever our clock says."""
        if self._stores is not None and self._plane.tenure.record is not None:
            self._keeper.fence("an engine has seen a higher fencing token")

    def _admin_deps(self) -> AdminDeps:
        return AdminDeps(
            plane=self._plane,
            report=self._reporter.report,
            persist=self._writer.write,
            health=lambda: {engine: view.healthy for engine, view in self._stages.views.items()},
            clock=lease_clock,
            metrics=self._metrics.handle,
            token=self._options.admin_token,
        )

    def _listen_to_signals(self) -> None:
        """The first SIGTERM or SIGINT stops gently, a second one stops waiting for streams. SIGHUP changes nothing."""
        loop = asyncio.get_running_loop()
        self._hurry = asyncio.Event()

        def told_to_stop() -> None:
            if self._stop.is_set():
                self._hurry.set()
            self._stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told_to_stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: log.info("hangup_ignored"))

    async def _close(self) -> None:
        await self._probes.cancel()
        await self._admin.finish(timeout_s=0, hurry=self._hurry)
        await self._peer.aclose()
        await self._death_watch.aclose()
        await self._engines.aclose()
        if self._stores is not None:
            await self._stores.aclose()


def lease_clock() -> float:
    """Return seconds that go on while the host is suspended: what the lease deadline is measured in."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_clock() -> float:
    """Return unix seconds, for the stamp in documents that people read."""
    return datetime.now(UTC).timestamp()


async def _cancel(*tasks: asyncio.Task[None] | asyncio.Task[Literal[True]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
