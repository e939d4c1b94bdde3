"""Placement: which engines may take new work, and which pair gets the next request.

Least loaded first; ties go to the engine that was placed longest ago, then by id, so that the same fleet always
answers the same. (Not least often: an engine that returns would get every tie until it had caught up.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from narwhal.core.engine import Engine
from narwhal.core.vocabulary import EngineId, Role

if TYPE_CHECKING:
    from narwhal.core.fleet import Fleet

NOBODY: frozenset[EngineId] = frozenset()


@dataclass(frozen=True, slots=True)
class Pair:
    """The two engines of one attempt."""

    prefill: Engine
    decode: Engine


@dataclass(frozen=True, slots=True)
class Exhausted:
    """No eligible engine for `roles`."""

    roles: tuple[Role, ...]


def eligible(fleet: Fleet, role: Role, *, now: float) -> list[Engine]:
    """Return the engines that may serve `role`, by id. A quarantine whose deadline has passed no longer counts."""
    return [engine for engine in fleet.by_role[role] if engine.blocked_until <= now]


def choose_one(fleet: Fleet, role: Role, *, now: float, exclude: frozenset[EngineId] = NOBODY) -> Engine | None:
    """Return the least loaded eligible engine of `role`, or None; an excluded one only if no other is left."""
    best: Engine | None = None
    best_key: tuple[bool, int, int] | None = None
    for engine in fleet.by_role[role]:
        if engine.blocked_until > now:
            continue
        key = (engine.id in exclude, engine.resident, engine.last_placed)
        if best_key is None or key < best_key:
            best, best_key = engine, key
    return best


def choose_decode(
    fleet: Fleet, prefill: Engine | None, *, now: float, exclude: frozenset[EngineId] = NOBODY
) -> Engine | None:
    """Return the decode engine for a ticket of `prefill`, avoiding those that are kept apart from it."""
    if prefill is not None and fleet.pairs.apart:
        exclude |= fleet.pairs.apart_from(prefill.id)
    return choose_one(fleet, Role.DECODE, now=now, exclude=exclude)


def choose(fleet: Fleet, *, now: float, exclude: frozenset[EngineId] = NOBODY) -> Pair | Exhausted:
    """Return the pair for a new attempt, avoiding `exclude` where another engine exists."""
    prefill = choose_one(fleet, Role.PREFILL, now=now, exclude=exclude)
    decode = choose_decode(fleet, prefill, now=now, exclude=exclude)
    if prefill is not None and decode is not None:
        return Pair(prefill, decode)
    return Exhausted(missing_roles(fleet, now=now))


def missing_roles(fleet: Fleet, *, now: float) -> tuple[Role, ...]:
    """Return the roles that no eligible engine serves."""
    return tuple(role for role in Role if not any(engine.blocked_until <= now for engine in fleet.by_role[role]))
