"""The faults of a simulated world: what can happen, to whom, for how long; and random lists of them from a seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from random import Random
from typing import Final

from narwhal.core.vocabulary import EngineId
from narwhal.testing.memory_engines import Condition
from narwhal.testing.processes import process_loop, run_processes
from narwhal.testing.world import Outcome, World
from narwhal.testing.world_store import REDIS

ACTIVE: Final = "the active router"
"""As a target: whoever is active when the fault begins."""


class Kind(StrEnum):
    """What may happen."""

    PAUSE = "pause"
    KILL = "kill"
    STOP = "stop"
    CUT_REQUESTS = "cut_requests"
    CUT_REPLIES = "cut_replies"
    CUT_REDIS = "cut_redis"
    CUT_PEERS = "cut_peers"
    SLOW_REDIS = "slow_redis"
    LOSE_REPLIES = "lose_replies"
    REDIS_HANGS = "redis_hangs"
    REDIS_DOWN = "redis_down"
    REDIS_RESTARTS_EMPTY = "redis_restarts_empty"
    FLUSH = "flush"
    DROP_LEASE = "drop_lease"
    CLOCK_STEP = "clock_step"
    ENGINE_TROUBLE = "engine_trouble"
    ENGINE_RESTART = "engine_restart"
    STAGE_CRASH = "stage_crash"
    DISK_FULL = "disk_full"
    DISK_SLOW = "disk_slow"
    DRAIN = "drain"
    UNDRAIN = "undrain"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens at `at` (loop seconds) and lasts `length_s`; `amount` is what its kind makes of it."""

    at: float
    kind: Kind
    target: str = ""
    length_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.target} for {self.length_s:.3f} s, amount {self.amount:.3f}"


End = Callable[[], None]


def schedule(world: World, faults: Sequence[Fault]) -> None:
    """Let each of `faults` begin and end in its time."""
    for fault in faults:
        process_loop().call_outside(fault.at, _begin, world, fault)


def simulate(seed: int, faults: Sequence[Fault], *, length_s: float, routers: int = 2) -> tuple[World, Outcome]:
    """Let `faults` happen to the world of `seed` for `length_s`, heal it, and return it with the outcome."""
    ended: list[tuple[World, Outcome]] = []

    async def live() -> None:
        world = World(seed, routers=routers)
        world.start_all()
        schedule(world, faults)
        await asyncio.sleep(length_s)
        ended.append((world, await world.settle()))

    run_processes(live())
    return ended[0]


def _begin(world: World, fault: Fault) -> None:
    end = BEGIN[fault.kind](world, fault)
    world.note(f"fault: {fault}")
    process_loop().call_outside(fault.length_s, _end, world, fault, end)


def _end(world: World, fault: Fault, end: End) -> None:
    end()
    world.note(f"end of {fault.kind} {fault.target}")


def _nothing() -> None:
    """End a fault that is over at once."""


def _router(world: World, fault: Fault) -> str:
    if fault.target != ACTIVE:
        return fault.target
    return world.active.name if world.active is not None else next(iter(world.hosts))


def _pause(world: World, fault: Fault) -> End:
    process = world.processes[_router(world, fault)]
    process_loop().freeze(process.process)
    return lambda: process_loop().thaw(process.process) if process.alive else None


def _kill(world: World, fault: Fault) -> End:
    name = _router(world, fault)
    world.processes[name].kill()
    return lambda: world.start(name)


def _stop(world: World, fault: Fault) -> End:
    name = _router(world, fault)
    process = world.processes[name]
    if process.alive:
        process.stop()

    def end() -> None:
        process.kill()
        world.start(name)

    return end


def _cut(directions: Callable[[str], Iterator[tuple[str, str]]]) -> Callable[[World, Fault], End]:
    def cut(world: World, fault: Fault) -> End:
        edges = list(directions(_router(world, fault)))
        for edge in edges:
            world.network.cut(*edge)
        return partial(world.network.heal_all, edges)

    return cut


def _requests(name: str) -> Iterator[tuple[str, str]]:
    yield (name, REDIS)


def _replies(name: str) -> Iterator[tuple[str, str]]:
    yield (REDIS, name)


def _both(name: str) -> Iterator[tuple[str, str]]:
    yield from _requests(name)
    yield from _replies(name)


def _cut_peers(world: World, fault: Fault) -> End:
    name = _router(world, fault)
    edges = [edge for other in world.hosts if other != name for edge in ((name, other), (other, name))]
    for edge in edges:
        world.network.cut(*edge)
    return partial(world.network.heal_all, edges)


def _slow(world: World, fault: Fault) -> End:
    edges = list(_both(_router(world, fault)))
    for edge in edges:
        world.network.slow(*edge, up_to_s=fault.amount)
    return partial(world.network.heal_all, edges)


def _lose_replies(world: World, fault: Fault) -> End:
    for _ in range(1 + int(fault.amount)):
        world.processes[_router(world, fault)].link.lose_reply_once()
    return _nothing


def _redis_hangs(world: World, fault: Fault) -> End:
    world.redis.hang()
    return world.redis.resume


def _redis_down(world: World, fault: Fault) -> End:
    world.redis.down = True
    return lambda: setattr(world.redis, "down", False)


def _redis_restarts_empty(world: World, fault: Fault) -> End:
    world.redis.flush()
    return _redis_down(world, fault)


def _flush(world: World, fault: Fault) -> End:
    world.redis.flush()
    return _nothing


def _drop_lease(world: World, fault: Fault) -> End:
    world.redis.drop_lease()
    return _nothing


def _clock_step(world: World, fault: Fault) -> End:
    world.redis.clock_offset_s += fault.amount
    return _nothing


def _engine_trouble(world: World, fault: Fault) -> End:
    engine = world.engines[fault.target]
    troubles = [condition for condition in Condition if condition is not Condition.WELL]
    engine.condition = troubles[int(fault.amount) % len(troubles)]
    return lambda: setattr(engine, "condition", Condition.WELL)


def _engine_restart(world: World, fault: Fault) -> End:
    engine = world.engines[fault.target]
    engine.condition = Condition.GONE
    return engine.restart


def _stage_crash(world: World, fault: Fault) -> End:
    crashing = world.views[_router(world, fault)].crashing
    crashing["telemetry"] = crashing["health"] = RuntimeError("a planted bug")
    return crashing.clear


def _disk_full(world: World, fault: Fault) -> End:
    disk = world.hosts[_router(world, fault)].disk
    disk.full = True
    return lambda: setattr(disk, "full", False)


def _disk_slow(world: World, fault: Fault) -> End:
    disk = world.hosts[_router(world, fault)].disk
    disk.delay_s = fault.amount
    return lambda: setattr(disk, "delay_s", 0.0)


def _operator(action: str) -> Callable[[World, Fault], End]:
    def order(world: World, fault: Fault) -> End:
        world.order(action, EngineId(fault.target))
        return _nothing

    return order


BEGIN: Final[dict[Kind, Callable[[World, Fault], End]]] = {
    Kind.PAUSE: _pause,
    Kind.KILL: _kill,
    Kind.STOP: _stop,
    Kind.CUT_REQUESTS: _cut(_requests),
    Kind.CUT_REPLIES: _cut(_replies),
    Kind.CUT_REDIS: _cut(_both),
    Kind.CUT_PEERS: _cut_peers,
    Kind.SLOW_REDIS: _slow,
    Kind.LOSE_REPLIES: _lose_replies,
    Kind.REDIS_HANGS: _redis_hangs,
    Kind.REDIS_DOWN: _redis_down,
    Kind.REDIS_RESTARTS_EMPTY: _redis_restarts_empty,
    Kind.FLUSH: _flush,
    Kind.DROP_LEASE: _drop_lease,
    Kind.CLOCK_STEP: _clock_step,
    Kind.ENGINE_TROUBLE: _engine_trouble,
    Kind.ENGINE_RESTART: _engine_restart,
    Kind.STAGE_CRASH: _stage_crash,
    Kind.DISK_FULL: _disk_full,
    Kind.DISK_SLOW: _disk_slow,
    Kind.DRAIN: _operator("drain"),
    Kind.UNDRAIN: _operator("undrain"),
}

assert BEGIN.keys() == set(Kind), "a new kind of fault needs a row"

ON_ROUTERS: Final = frozenset(Kind) - {
    Kind.REDIS_HANGS,
    Kind.REDIS_DOWN,
    Kind.REDIS_RESTARTS_EMPTY,
    Kind.FLUSH,
    Kind.DROP_LEASE,
    Kind.CLOCK_STEP,
    Kind.ENGINE_TROUBLE,
    Kind.ENGINE_RESTART,
    Kind.DRAIN,
    Kind.UNDRAIN,
}
ON_ENGINES: Final = frozenset({Kind.ENGINE_TROUBLE, Kind.ENGINE_RESTART, Kind.DRAIN, Kind.UNDRAIN})
WEIGHTED: Final = [*Kind, Kind.DRAIN, Kind.DRAIN, Kind.UNDRAIN, Kind.PAUSE, Kind.KILL, Kind.DROP_LEASE]
AMOUNTS: Final[dict[Kind, tuple[float, float]]] = {
    Kind.SLOW_REDIS: (0.05, 1.5),
    Kind.LOSE_REPLIES: (0.0, 3.0),
    Kind.CLOCK_STEP: (-3.0, 5.0),
    Kind.ENGINE_TROUBLE: (0.0, 4.0),
    Kind.DISK_SLOW: (0.1, 3.0),
}


@dataclass(frozen=True, slots=True)
class Mix:
    """Which faults come, and how densely: one every `every_s` or so."""

    kinds: Sequence[Kind] = tuple(WEIGHTED)
    every_s: float = 2.5


ANYTHING: Final = Mix()


def random_faults(
    seed: int, *, length_s: float, routers: Sequence[str], engines: Sequence[str], mix: Mix = ANYTHING
) -> list[Fault]:
    """Return faults that begin after the pair had 5 s to form and end before `length_s`."""
    random = Random(f"faults {seed}")  # noqa: S311 - a run must be repeatable
    faults = []
    at = 5.0
    while (at := at + random.expovariate(1 / mix.every_s)) < length_s - 1:
        kind = random.choice(mix.kinds)
        length = random.choice((0.1, 0.5, 2.0, 6.0)) * random.uniform(0.3, 1.5)
        faults.append(
            Fault(
                at=round(at, 4),
                kind=kind,
                target=_target(random, kind, routers, engines),
                length_s=round(min(length_s - at, length), 4),
                amount=round(random.uniform(*AMOUNTS.get(kind, (0.0, 0.0))), 4),
            )
        )
    return faults


def _target(random: Random, kind: Kind, routers: Sequence[str], engines: Sequence[str]) -> str:
    if kind in ON_ROUTERS:
        return random.choice([ACTIVE, *routers])
    return random.choice(engines) if kind in ON_ENGINES else REDIS
