"""A simulated cluster: routers, Redis, engines, clients and an operator in one process, in virtual time, from one seed.

The routers are the product's own parts. Everything around them is simulated and may fail at any instant, see
`world_faults`; `settle` then heals everything and looks whether the pair forms again by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from narwhal.config import Config, parse_config
from narwhal.core.vocabulary import EngineId, PeerSign, RouterRole
from narwhal.ports import PeerLook
from narwhal.testing.history import History, Noted
from narwhal.testing.invariants import Violation, check
from narwhal.testing.memory_engines import Condition, MemoryEngines
from narwhal.testing.memory_file import MemoryDisk
from narwhal.testing.network import Network
from narwhal.testing.processes import process_loop
from narwhal.testing.world_peer import Surroundings
from narwhal.testing.world_router import Host, RouterProcess
from narwhal.testing.world_store import WorldRedis

CLIENT_EVERY_S: Final = 0.01
OTHERS_EVERY: Final = 5
QUEUE_MAX: Final = 20
"""Requests that wait in the socket of a frozen router."""

ENGINES: Final = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}

CONTROL_BACK_S: Final = 2.0 / (1 - 0.005) + 3 * 0.25 + 1.0
"""A lease that must be waited for, the looks at an active that must be replaced, and some slack."""

READY_BACK_S: Final = CONTROL_BACK_S + 8.0
"""The same, and the time that readmission takes if every engine was ejected."""

QUIET_S: Final = 10.0

SECTIONS: Final[dict[str, dict[str, Any]]] = {
    "recovery": {
        "eject_after": 3,
        "liveness_every_s": 2.0,
        "liveness_timeout_s": 1.0,
        "retry_backoff_s": 0.5,
        "retry_backoff_max_s": 2.0,
    },
    "engine": {"health_timeout_s": 0.5, "probe_timeout_s": 1.0},
    "controller": {"stage_timeout_s": 2.0, "telemetry_every_s": 2.0},
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `control_back_s` and `ready_back_s` count from the last fault; None is never."""

    violations: tuple[Violation, ...]
    problems: tuple[str, ...]
    control_back_s: float | None
    ready_back_s: float | None


class World:
    """The cluster of one seed."""

    def __init__(self, seed: int, *, routers: int = 2) -> None:
        self.random = Random(f"world {seed}")  # noqa: S311 - a run must be repeatable
        self.history = History()
        self.network = Network(Random(f"network {seed}"))  # noqa: S311 - as above
        self.redis = WorldRedis(self.history, self._who_may_admit)
        self.engines = MemoryEngines(ENGINES.items())
        names = [f"router-{letter}" for letter in "abcdefgh"[:routers]]
        self.hosts = {name: self._host(name) for name in names}
        self.views = {name: self.engines.view() for name in names}
        self._around = Surroundings(self.history, self.redis, self.network, self._ask_ready, self._is_dead)
        self._queued: dict[str, int] = {}
        self._rounds = 0
        self.processes: dict[str, RouterProcess] = {}
        self._former: list[RouterProcess] = []

    def start(self, name: str) -> None:
        """Start a router's process, unless one runs."""
        running = self.processes.get(name)
        if running is not None and running.alive:
            return
        if running is not None:
            self._former.append(running)
        process = RouterProcess(self._config(name), self.hosts[name], self.views[name], self._around)
        self.processes[name] = process
        process.start()

    def start_all(self) -> None:
        """Start every router, and the clients."""
        for name in self.hosts:
            self.start(name)
        process_loop().call_outside(CLIENT_EVERY_S, self._clients_ask)

    def living(self) -> Iterator[RouterProcess]:
        """Every process that has not been killed, frozen ones too."""
        return (process for process in self.processes.values() if process.alive)

    @property
    def active(self) -> RouterProcess | None:
        """The process that calls itself active."""
        return next((process for process in self.living() if process.plane.role is RouterRole.ACTIVE), None)

    async def settle(self) -> Outcome:
        """Heal everything, give the pair time, and say how it went."""
        self.heal()
        control_back_s, ready_back_s = await self._recovered()
        await asyncio.sleep(QUIET_S)
        return Outcome(
            violations=tuple(check(self.history.records)),
            problems=(*self._crashes(), *self.misshapen()),
            control_back_s=control_back_s,
            ready_back_s=ready_back_s,
        )

    def heal(self) -> None:
        """End every fault, also those that would go on; an operator orders every engine back."""
        self.note("everything is healed")
        self.network.heal_all(list(self.network.faults()))
        self.redis.down = False
        self.redis.resume()
        for engine in self.engines.engines.values():
            engine.condition = Condition.WELL
            engine.poisons.clear()
        for name, host in self.hosts.items():
            host.disk.full, host.disk.delay_s = False, 0.0
            self.views[name].crashing.clear()
            self.start(name)
            process_loop().thaw(self.processes[name].process)

    def misshapen(self) -> list[str]:
        """Return what is not as it should be in a pair that had time to form."""
        problems = []
        roles = [process.plane.role for process in self.living()]
        if sorted(roles) != sorted([RouterRole.ACTIVE] + [RouterRole.STANDBY] * (len(self.hosts) - 1)):
            problems.append(f"the routers are {', '.join(roles)}")
        for process in self.living():
            if process.plane.role is RouterRole.STANDBY:
                problems += self._unfit(process)
        return problems

    def note(self, what: str) -> None:
        """Add a line to the history."""
        self.history.add(Noted(asyncio.get_running_loop().time(), what))

    def order(self, action: str, engine: EngineId) -> None:
        """Let an operator ask the active router to `drain` or `undrain` an engine."""
        active = self.active
        if active is not None:
            process_loop().start(active.process, getattr(active, action)(engine), name=f"{action}-{engine}")

    async def _recovered(self) -> tuple[float | None, float | None]:
        """Return how long it takes until a router is in control again, and until one is ready."""
        loop = asyncio.get_running_loop()
        began, control_back_s = loop.time(), None
        ordered: RouterProcess | None = None
        while loop.time() < began + READY_BACK_S:
            active = self.active
            if active is not None and active.holds and active.plane.monitoring.degraded is None:
                control_back_s = loop.time() - began if control_back_s is None else control_back_s
                if active is not ordered:
                    ordered = active
                    for name in ENGINES:
                        self.order("undrain", EngineId(name))
                if active.ready:
                    return control_back_s, loop.time() - began
            await asyncio.sleep(0.01)
        return control_back_s, None

    def _unfit(self, standby: RouterProcess) -> Iterator[str]:
        if standby.plane.ineligible is not None:
            yield f"{standby.name} could not take over: {standby.plane.ineligible}"
        if not standby.plane.monitoring.clean:
            yield f"{standby.name}'s monitoring is not clean"
        applied, newest = standby.follower.applied, self.redis.newest_handoff
        if applied is None or newest is None or (newest[0], newest[1] - 1) > applied:
            yield f"{standby.name} follows at {applied}, and {newest} is there"

    def _clients_ask(self) -> None:
        """Ask every router that calls itself active, and now and then the others too."""
        self._rounds += 1
        everybody = self._rounds % OTHERS_EVERY == 0
        for process in self.processes.values():
            if process.alive and (everybody or process.plane.role is RouterRole.ACTIVE):
                self._ask(process)
        process_loop().call_outside(CLIENT_EVERY_S, self._clients_ask)

    def _ask(self, process: RouterProcess) -> None:
        """Send a request; a frozen router finds it in its socket when it is thawed."""
        loop, name = process_loop(), process.process
        if not loop.frozen(name):
            self._queued.pop(name, None)
            loop.run_in(name, process.ask)
        elif self._queued.get(name, 0) < QUEUE_MAX:
            self._queued[name] = self._queued.get(name, 0) + 1
            loop.call_in(name, process.ask)

    def _ask_ready(self, target: str, reply: Callable[[PeerLook], None]) -> None:
        process = self.processes.get(target)
        if process is None or not process.alive:
            reply(PeerLook(PeerSign.REFUSED, detail="nobody listens"))
        else:
            process_loop().run_in(process.process, lambda: reply(process.say_ready()))

    def _is_dead(self, process: str) -> bool:
        return all(other.process != process for other in self.living())

    def _crashes(self) -> Iterator[str]:
        for process in (*self._former, *self.processes.values()):
            if process.crash is not None:
                yield f"{process.process} crashed: {process.crash!r}"

    def _who_may_admit(self) -> list[str]:
        return [process.name for process in self.living() if process.holds]

    def _host(self, name: str) -> Host:
        return Host(
            name,
            MemoryDisk(),
            clock_ahead_s=self.random.uniform(0, 1e6),
            rate=1 + self.random.uniform(-0.004, 0.004),
        )

    def _config(self, name: str) -> Config:
        engines = [{"id": engine, "url": f"http://{engine}:8000", "role": role} for engine, role in ENGINES.items()]
        document = {"serving": {"models": ["m"]}, "engines": engines, "router": {"id": name}, **SECTIONS}
        return parse_config(document, source="world")
