"""Runs simulated worlds and reports on them: `python -m narwhal.testing.simulation --seed 7 --hours 1`.

A world that breaks an invariant, or does not form again, is reported with its seed, with as few of its faults as still
break the same invariant, and with what happened before.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from narwhal.testing.history import Admitted, LeaseGranted
from narwhal.testing.world import CONTROL_BACK_S, ENGINES, READY_BACK_S, Outcome, World
from narwhal.testing.world_faults import ANYTHING, Fault, Mix, random_faults, simulate

EXIT_OK: Final = 0
EXIT_BROKEN: Final = 1
CHUNK_S: Final = 600.0
"""A long run is made of worlds of this length: each begins afresh, from a seed of its own."""

TRIES_MAX: Final = 80


@dataclass(frozen=True, slots=True)
class Run:
    """One world of one seed, and how it ended."""

    seed: int
    routers: int
    length_s: float
    faults: tuple[Fault, ...]
    world: World
    outcome: Outcome

    @property
    def broken(self) -> str | None:
        """Name what broke first, or None: an invariant, `forming`, or `I8` when nobody came back in time."""
        outcome = self.outcome
        if outcome.violations:
            return outcome.violations[0].invariant
        if outcome.control_back_s is None or outcome.control_back_s > CONTROL_BACK_S:
            return "I8"
        if outcome.ready_back_s is None or outcome.ready_back_s > READY_BACK_S:
            return "I8"
        return "forming" if outcome.problems else None

    @property
    def grants(self) -> int:
        """How often the lease was granted."""
        return sum(isinstance(record, LeaseGranted) for record in self.world.history.records)

    @property
    def admissions(self) -> int:
        """How many requests were admitted."""
        return sum(isinstance(record, Admitted) for record in self.world.history.records)

    def report(self) -> str:
        """Say what broke, with seed, faults and the records before it."""
        records = self.world.history.records
        index = self.outcome.violations[0].index if self.outcome.violations else len(records) - 1
        return "\n".join(
            [
                f"seed {self.seed}, {self.routers} routers, {self.length_s:g} s: {self.broken} is broken",
                *(f"{violation.invariant}: {violation.why}" for violation in self.outcome.violations[:5]),
                *self.outcome.problems,
                f"in control again after {self.outcome.control_back_s} s, ready after {self.outcome.ready_back_s} s",
                f"{len(self.faults)} faults:",
                *(f"  {fault!r}," for fault in self.faults),
                "what happened before:",
                self.world.history.around(index),
            ]
        )


def run_seed(seed: int, *, length_s: float, routers: int = 2, mix: Mix = ANYTHING) -> Run:
    """Run the world of `seed` for `length_s` virtual seconds of random faults."""
    names = [f"router-{letter}" for letter in "abcdefgh"[:routers]]
    faults = random_faults(seed, length_s=length_s, routers=names, engines=list(ENGINES), mix=mix)
    return run_faults(seed, faults, length_s=length_s, routers=routers)


def run_faults(seed: int, faults: Iterable[Fault], *, length_s: float, routers: int = 2) -> Run:
    """Run the world of `seed` with exactly these faults."""
    chosen = tuple(faults)
    world, outcome = simulate(seed, chosen, length_s=length_s, routers=routers)
    return Run(seed, routers, length_s, chosen, world, outcome)


def shrunk(run: Run, *, tries_max: int = TRIES_MAX) -> Run:
    """Return a run in which the same thing breaks with as few faults as `tries_max` further runs can find."""
    broken, smallest, tries, part = run.broken, run, 0, max(1, len(run.faults) // 2)
    while part >= 1 and tries < tries_max:
        at, shorter = 0, False
        while at < len(smallest.faults) and tries < tries_max:
            tries += 1
            rest = smallest.faults[:at] + smallest.faults[at + part :]
            candidate = run_faults(run.seed, rest, length_s=run.length_s, routers=run.routers)
            if candidate.broken == broken:
                smallest, shorter = candidate, True
            else:
                at += part
        if part == 1 and not shorter:
            break
        part = max(1, part // 2) if part > 1 else 1
    return smallest


def replay(seed: int, *, hours: float, routers: int, say: Callable[[str], object]) -> int:
    """Run `hours` of worlds from `seed` on, saying how each went; stop at the first that breaks, and report it."""
    left_s = hours * 3600
    while left_s > 0:
        length_s = min(CHUNK_S, max(left_s, 30.0))
        run = run_seed(seed, length_s=length_s, routers=routers)
        say(f"seed {seed}: {length_s:g} s, {len(run.faults)} faults, {run.grants} terms, {run.admissions} admissions")
        if run.broken is not None:
            say(shrunk(run).report())
            return EXIT_BROKEN
        left_s -= length_s
        seed += 1
    return EXIT_OK


def quiet() -> None:
    """Let the product's log say nothing: a simulation writes its own history."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def main(arguments: Sequence[str]) -> int:
    """Replay worlds as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m narwhal.testing.simulation", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first world (default: 1)")
    parser.add_argument("--hours", type=float, default=1 / 30, help="virtual time altogether (default: two minutes)")
    parser.add_argument("--routers", type=int, default=2, choices=range(1, 6), help="in the cluster (default: 2)")
    options = parser.parse_args(arguments)
    quiet()
    return replay(
        options.seed,
        hours=options.hours,
        routers=options.routers,
        say=lambda text: sys.stdout.write(text + "\n") and sys.stdout.flush(),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
