"""One router process of a simulated world: the product's own parts over simulated stores, engines, peers and clocks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

from narwhal.config import Config
from narwhal.core import placement
from narwhal.core.control_plane import ControlPlane
from narwhal.core.events import DrainCancelled, DrainOrdered, LegFailed, LegReleased, LegStarted, LegSucceeded
from narwhal.core.handoff import HANDOFF_SCHEMA_VERSION, configured_engine_set
from narwhal.core.lease import LeaseRecord, ProcessIdentity
from narwhal.core.placement import Pair
from narwhal.core.tenure import Tenure
from narwhal.core.vocabulary import EngineId, FencingToken, Leg, Role, RouterId, RouterRole
from narwhal.errors import NarwhalError
from narwhal.ha.follower import Follower
from narwhal.ha.keeper import LeaseKeeper
from narwhal.ha.life import RouterLife
from narwhal.ha.lookout import Lookout
from narwhal.ha.peer import read_ready
from narwhal.ha.standby import Standby, StandbyOptions
from narwhal.monitor.handoff_writer import HandoffWriter
from narwhal.monitor.loop import MonitorLoop
from narwhal.monitor.probe_runner import ProbeRunner
from narwhal.monitor.readmission_runner import ReadmissionRunner
from narwhal.monitor.reporter import Reporter
from narwhal.monitor.stages import Stages
from narwhal.ports import PeerLook
from narwhal.testing.history import (
    Admitted,
    BecameActive,
    DrainAcknowledged,
    Fenced,
    Noted,
    UndrainOrdered,
)
from narwhal.testing.memory_engines import MemoryEngines
from narwhal.testing.memory_file import MemoryDisk, MemoryFile, MemoryTokens
from narwhal.testing.memory_store import MemoryHandoffStore, MemoryLeaseStore
from narwhal.testing.processes import process_loop
from narwhal.testing.world_peer import Surroundings, WorldHolderWatch, WorldPeer
from narwhal.testing.world_store import WorldLink

PREFILL_S: Final = 0.02
DECODE_S: Final = 0.1
LEGS_EVERY: Final = 16
"""One admission in so many runs its legs and gives evidence; the others only show who admits, and where."""


class WatchedPlane(ControlPlane):
    """A control plane that says when its role changes."""

    def __init__(self, config: Config, process: RouterProcess) -> None:
        self._process = process
        self._role = RouterRole.STANDBY
        super().__init__(config)
        self.tenure = WatchedTenure(process, margin_s=config.ha.margin_s, clock_error=config.ha.clock_error)

    @property
    def role(self) -> RouterRole:
        """The router's role."""
        return self._role

    @role.setter
    def role(self, role: RouterRole) -> None:
        before, self._role = self._role, role
        if role is RouterRole.ACTIVE and before is not role:
            self._process.became_active()


class WatchedTenure(Tenure):
    """A tenure that says when it is fenced."""

    __slots__ = ("_process",)

    def __init__(self, process: RouterProcess, *, margin_s: float, clock_error: float) -> None:
        super().__init__(margin_s=margin_s, clock_error=clock_error)
        self._process = process

    def fence(self, reason: str) -> None:
        """End the term, and note it."""
        super().fence(reason)
        self._process.fenced(reason)


@dataclass(slots=True)
class Host:
    """What outlives a router's process: its disk and its clock, which runs `rate` times as fast as the world's."""

    name: str
    disk: MemoryDisk
    clock_ahead_s: float
    rate: float
    incarnations: int = 0

    def clock(self) -> float:
        """The lease clock of this host."""
        return self.clock_ahead_s + asyncio.get_running_loop().time() * self.rate


class RouterProcess:
    """One start of one router. Everything that it runs belongs to the process named `process`."""

    def __init__(self, config: Config, host: Host, engines: MemoryEngines, around: Surroundings) -> None:
        self.host = host
        self.name = host.name
        host.incarnations += 1
        self.process = f"{host.name}#{host.incarnations}"
        self.engines = engines
        self._around = around
        self.history = around.history
        self.plane = WatchedPlane(config, self)
        self.link = WorldLink(around.redis, around.network, host.name, op_timeout_s=config.ha.op_timeout_s)
        self.alive = True
        self.crash: BaseException | None = None
        self.asked = 0
        self._build_monitor()
        self._build_life()

    def _build_monitor(self) -> None:
        plane = self.plane
        self.probes = ProbeRunner(plane, self.engines)
        self.reporter = Reporter(plane, start_probe=self.probes.start)
        self.probes.report = self.reporter.report
        readmission = ReadmissionRunner(plane, self.engines, self.reporter.report)
        self.file = MemoryFile(self.host.disk)
        self.mirror = MemoryHandoffStore(self.link)
        self.writer = HandoffWriter(plane, file=self.file, mirror=self.mirror, clock=self.clock, wall=lambda: 0.0)
        self.stages = Stages(plane, self.engines, self.reporter, readmission, self.writer)
        self.monitor = MonitorLoop(plane, self.stages, self.reporter)

    def _build_life(self) -> None:
        plane, store = self.plane, MemoryLeaseStore(self.link)
        keeper = LeaseKeeper(plane, store, ha=plane.config.ha, clock=self.clock)
        self.follower = Follower(plane, file=self.file, mirror=self.mirror)
        self.standby = Standby(
            plane,
            store=store,
            keeper=keeper,
            follower=self.follower,
            lookout=Lookout(
                RouterId(self.name),
                plane.config.ha,
                peer=WorldPeer(self._around, self.name),
                holder_watch=WorldHolderWatch(self._around, self.name),
            ),
            could_serve=self.stages.could_serve,
        )
        self.life = RouterLife(
            plane,
            standby=self.standby,
            keeper=keeper,
            tokens=MemoryTokens(self.host.disk),
            write_handoff=self.writer.write,
        )

    def start(self) -> None:
        """Begin to live, resuming from the handoff on this host's disk."""
        self._note("starts")
        self._run(self._live(), "life")
        self._run(self.monitor.run(), "monitor")

    async def _live(self) -> None:
        await self.follower.resume_from_file()
        await self.life.run(self._candidate(), StandbyOptions())

    def _candidate(self) -> LeaseRecord:
        return LeaseRecord(
            router=RouterId(self.name),
            incarnation=self.process,
            token=FencingToken(0),
            ttl_ms=round(self.plane.config.ha.lease_ttl_s * 1000),
            url=f"http://{self.name}",
            admin_url=f"http://{self.name}:1",
            engine_set=configured_engine_set(self.plane.config.engines),
            schema=HANDOFF_SCHEMA_VERSION,
            version="simulated",
            process=ProcessIdentity(self.name, "boot", "pid:[1]", 1, 1),
        )

    def kill(self) -> None:
        """End at this instant, without running another line of this process."""
        if self.alive:
            self.alive = False
            process_loop().freeze(self.process)
            self._note("is killed")

    def stop(self) -> None:
        """Be told to stop gently, as by SIGTERM; the process ends when it has stepped down."""
        self._run(self._end(), "stop")

    async def _end(self) -> None:
        self._note("is told to stop")
        await self.life.step_down()
        self._note("has stepped down")
        self.kill()

    def clock(self) -> float:
        """The lease clock."""
        return self.host.clock()

    @property
    def holds(self) -> bool:
        """Whether this process, were it to run now, would still believe in its term."""
        return self.alive and self.plane.tenure.held(self.clock())

    @property
    def ready(self) -> bool:
        """Whether it would admit now."""
        return self.plane.readiness(now=_now(), lease_now=self.clock()).ready

    def say_ready(self) -> PeerLook:
        """Answer /ready."""
        answer = self.plane.readiness(now=_now(), lease_now=self.clock())
        document: dict[str, Any] = {
            "reason": answer.reason,
            "control_ready": answer.control_ready,
            "role": self.plane.role,
            "fencing_token": self.plane.tenure.token,
            "term_over": self.plane.tenure.over,
        }
        return read_ready(200 if answer.ready else 503, json.dumps(document).encode())

    def ask(self) -> None:
        """Take a client's request if this router is ready, as the serving layer does."""
        plane, now = self.plane, _now()
        if not plane.readiness(now=now, lease_now=self.clock()).ready:
            return
        pair = placement.choose(plane.fleet, now=now)
        assert isinstance(pair, Pair), "a ready router has a pair"
        self.history.add(Admitted(now, self.name, plane.tenure.token, (pair.prefill.id, pair.decode.id)))
        self.asked += 1
        if self.asked % LEGS_EVERY == 0:
            self.reporter.report(LegStarted(pair.prefill.id, Leg.PREFILL))
            asyncio.get_running_loop().call_later(PREFILL_S, self._prefilled, pair.prefill.id, pair.decode.id)

    def _prefilled(self, giver: EngineId, taker: EngineId) -> None:
        """The prefill leg ended: the decode engine is chosen now, if the term still holds."""
        self.reporter.report(LegReleased(giver, Leg.PREFILL))
        if not self._leg_ended(giver, Leg.PREFILL, taker) or not self.plane.tenure.held(self.clock()):
            return
        chosen = placement.choose_one(self.plane.fleet, Role.DECODE, now=_now())
        if chosen is not None:
            self.history.add(Admitted(_now(), self.name, self.plane.tenure.token, (chosen.id,)))
            self.reporter.report(LegStarted(chosen.id, Leg.DECODE))
            asyncio.get_running_loop().call_later(DECODE_S, self._decoded, giver, chosen.id)

    def _decoded(self, giver: EngineId, taker: EngineId) -> None:
        self.reporter.report(LegReleased(taker, Leg.DECODE))
        self._leg_ended(taker, Leg.DECODE, giver)

    def _leg_ended(self, engine: EngineId, leg: Leg, partner: EngineId) -> bool:
        fault = self.engines.leg_fault(self.engines[engine])
        if fault is None:
            self.reporter.report(LegSucceeded(engine, leg))
        else:
            self.reporter.report(LegFailed(engine, leg, fault, partner))
        return fault is None

    async def drain(self, engine: EngineId) -> None:
        """Carry out an operator's drain, as the admin port does; it is acknowledged when it is in the handoff."""
        if await self._act(DrainOrdered(engine, "operator", "simulated")):
            written = self.writer.written
            assert written is not None
            self.history.add(DrainAcknowledged(_now(), self.name, engine, written.order))

    async def undrain(self, engine: EngineId) -> None:
        """Carry out an operator's undrain."""
        if self.writer.may_write:
            self.history.add(UndrainOrdered(_now(), engine))
        await self._act(DrainCancelled(engine, "operator", "simulated"))

    async def _act(self, event: DrainOrdered | DrainCancelled) -> bool:
        if not self.writer.may_write:
            return False
        self.reporter.report(event)
        try:
            await self.writer.write()
        except NarwhalError as error:
            self._note(f"refuses to acknowledge {type(event).__name__} of {event.engine}: {error}")
            return False
        return self.writer.may_write

    def became_active(self) -> None:
        """Note with which handoff admission opens."""
        newest = self._around.redis.newest_handoff
        self.history.add(BecameActive(_now(), self.name, self.plane.tenure.token, self.follower.applied, newest))

    def fenced(self, reason: str) -> None:
        """Note the end of a term."""
        self.history.add(Fenced(_now(), self.name, self.plane.tenure.token, reason))

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` in this process; what ends it by an error ends the process, and shows in the history."""
        task = process_loop().start(self.process, work, name=name)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self.alive and not task.cancelled() and (error := task.exception()) is not None:
            self.crash = error
            self.kill()

    def _note(self, what: str) -> None:
        self.history.add(Noted(_now(), f"{self.process} {what}"))


def _now() -> float:
    return asyncio.get_running_loop().time()
