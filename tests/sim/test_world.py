"""Worlds of random faults: nothing that must never happen happens, and the pair forms again when the faults end."""

from __future__ import annotations

import pytest

from narwhal.testing.simulation import run_seed, shrunk

PAIRS = range(1000, 1040)
TRIOS = range(2000, 2010)
LENGTH_S = 60.0


@pytest.mark.parametrize(("seed", "routers"), [*((seed, 2) for seed in PAIRS), *((seed, 3) for seed in TRIOS)], ids=str)
def test_no_fault_breaks_an_invariant(seed: int, routers: int) -> None:
    run = run_seed(seed, length_s=LENGTH_S, routers=routers)
    assert run.broken is None, shrunk(run).report()
    assert run.admissions > 0, "a world in which nobody ever admits shows nothing"


def test_the_same_seed_is_the_same_world() -> None:
    one, other = (run_seed(7, length_s=30.0) for _ in range(2))
    assert one.world.history.records == other.world.history.records
