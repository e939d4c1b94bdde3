"""The simulation finds a protocol that was broken on purpose: each mistake breaks the invariant that it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from narwhal.core.control_plane import ControlPlane
from narwhal.core.handoff import HandoffDocument
from narwhal.core.lease import LeaseObservation
from narwhal.core.takeover import Attempt, Takeover, TakeoverDecision
from narwhal.core.tenure import Tenure
from narwhal.core.vocabulary import HoldKind
from narwhal.ha import standby as standby_module
from narwhal.ha.follower import Follower, Order
from narwhal.ha.standby import Standby
from narwhal.testing.memory_store import MemoryRedis
from narwhal.testing.processes import process_loop
from narwhal.testing.simulation import Run, run_seed, shrunk
from narwhal.testing.world import World
from narwhal.testing.world_faults import Kind, Mix

Break = Callable[[pytest.MonkeyPatch], None]

LENGTH_S = 60.0
SEEDS = range(1, 25)


def caught(mix: Mix) -> Run:
    """The first run that breaks, or a failure."""
    for seed in SEEDS:
        run = run_seed(seed, length_s=LENGTH_S, mix=mix)
        if run.broken is not None:
            return run
    pytest.fail(f"{len(SEEDS)} worlds of {LENGTH_S:g} s did not show it")


class EagerTakeover(Takeover):
    """Takes a missing lease at once, whatever the reason."""

    def _without_holder(self, seen: LeaseObservation, *, now: float) -> TakeoverDecision:
        return Attempt(seen.epoch, after=seen.token, why="eager")


def take_a_missing_lease_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(standby_module, "Takeover", EagerTakeover)


def have_no_local_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tenure, "_validity_s", lambda self, record: 1e6)


def mint_tokens_without_a_floor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Standby, "raise_floor", lambda self, token: None)


def take_any_handoff(patch: pytest.MonkeyPatch) -> None:
    def put(self: MemoryRedis, document: HandoffDocument) -> None:
        self._data.handoff = document

    patch.setattr(MemoryRedis, "put_handoff", put)


def take_over_without_reading_the_handoff(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Follower, newest: Order | None) -> None:
        pass

    patch.setattr(Follower, "catch_up", nothing)


def forget_drains_when_a_handoff_is_read(patch: pytest.MonkeyPatch) -> None:
    restore = ControlPlane.restore

    def forgetful(self: ControlPlane, document: HandoffDocument, *, now: float) -> None:
        restore(self, document, now=now)
        for engine in self.fleet.engines.values():
            engine.holds.pop(HoldKind.OPERATOR_DRAIN, None)
            engine.refresh()

    patch.setattr(ControlPlane, "restore", forgetful)


def take_a_frozen_router_for_a_dead_one(patch: pytest.MonkeyPatch) -> None:
    def is_dead(self: World, process: str) -> bool:
        return not any(other.process == process and not process_loop().frozen(process) for other in self.living())

    patch.setattr(World, "_is_dead", is_dead)


@pytest.mark.parametrize(
    ("mistake", "mix", "invariants"),
    [
        (take_a_missing_lease_at_once, Mix([Kind.FLUSH, Kind.DROP_LEASE]), {"I1"}),
        (have_no_local_deadline, Mix([Kind.CUT_REDIS, Kind.PAUSE]), {"I1"}),
        (mint_tokens_without_a_floor, Mix([Kind.CLOCK_STEP, Kind.FLUSH, Kind.KILL], 0.7), {"I2", "I3"}),
        (take_any_handoff, Mix([Kind.CUT_REQUESTS, Kind.CUT_REDIS, Kind.PAUSE]), {"I3"}),
        (take_over_without_reading_the_handoff, Mix([Kind.STOP, Kind.DRAIN, Kind.UNDRAIN], 1.0), {"I3", "I4"}),
        (take_a_frozen_router_for_a_dead_one, Mix([Kind.PAUSE]), {"I1"}),
        (forget_drains_when_a_handoff_is_read, Mix([Kind.KILL, Kind.STOP, Kind.DRAIN]), {"I4"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_mistake_is_found(
    mistake: Break, mix: Mix, invariants: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    run = caught(mix)
    assert run.broken in invariants, run.report()


def test_a_report_names_seed_faults_and_what_happened_with_few_faults_left(monkeypatch: pytest.MonkeyPatch) -> None:
    take_a_missing_lease_at_once(monkeypatch)
    run = caught(Mix())
    small = shrunk(run)
    assert small.broken == run.broken
    assert len(small.faults) <= 2
    report = small.report()
    assert f"seed {run.seed}, 2 routers" in report
    assert "Fault(at=" in report
    assert "admits under" in report
