"""From the control plane to a document and back: everything that must survive a takeover does."""

from __future__ import annotations

import pytest

from narwhal.core.control_plane import ControlPlane
from narwhal.core.counters import CounterName
from narwhal.core.events import (
    DrainOrdered,
    EjectionOrdered,
    GenerationSeen,
    HoldPlaced,
    InferenceProbed,
    LegFailed,
    LegStarted,
    LegSucceeded,
    ReadmissionFailed,
)
from narwhal.core.handoff import HandoffDocument, LeasePart, decode_handoff
from narwhal.core.pairs import PairIds
from narwhal.core.vocabulary import FailureClass, FencingToken, HoldKind, Leg, ProbeKind, ReadmissionStep, Role
from tests.core.fleets import D1, D2, P1, P2, make_plane, unclear
from tests.core.leases import A

F = FailureClass
THEN, NOW = 1000.0, 64.0
"""Loop seconds of the router that wrote, and of the one that restores: their clocks have nothing in common."""


def written(plane: ControlPlane, *, now: float = THEN, version: int = 3) -> HandoffDocument:
    """The document as the other router reads it: through its text."""
    lease = LeasePart(router=A, incarnation="a-1", token=FencingToken(7))
    return decode_handoff(plane.capture(lease, version=version, now=now, wall=1.5e9).encode())


def busy_plane() -> ControlPlane:
    """A plane with one of everything."""
    plane = make_plane(recovery={"failure_quarantine_s": 60.0, "eject_after": 3})
    plane.apply(DrainOrdered(P1, "ann", "upgrade"), now=900.0)
    plane.apply(GenerationSeen(P2, "g1"), now=910.0)
    plane.apply(LegFailed(P2, Leg.PREFILL, F.TIMEOUT, D1), now=911.0)
    for _ in range(3):
        plane.apply(LegFailed(D1, Leg.DECODE, F.STREAM, P2), now=940.0)
    plane.apply(InferenceProbed(D1, (unclear(P2, D1),)), now=950.0)
    plane.fleet.pairs.part(PairIds(P1, D1), "no link", 955.0)
    plane.apply(EjectionOrdered(D2, "bob", "smells"), now=960.0)
    plane.apply(ReadmissionFailed(D2, ReadmissionStep.KV_TRANSFER, "no partner"), now=970.0)
    plane.apply(LegStarted(P2, Leg.PREFILL), now=980.0)
    plane.controller.review(now=985.0)
    plane.counters.add(CounterName.TAKEOVERS, 4)
    return plane


def restored(plane: ControlPlane, *, now: float = NOW) -> ControlPlane:
    other = make_plane(recovery={"failure_quarantine_s": 60.0, "eject_after": 3})
    other.restore(written(plane), now=now)
    return other


def test_a_document_that_was_restored_and_captured_again_is_the_same() -> None:
    document = written(busy_plane())
    assert written(restored(busy_plane()), now=NOW) == document


def test_a_drain_survives_with_its_actor_and_reason() -> None:
    drain = restored(busy_plane()).fleet.engines[P1].holds[HoldKind.OPERATOR_DRAIN]
    assert (drain.actor, drain.reason, drain.since) == ("ann", "upgrade", NOW - 100)


def test_an_ejection_survives_with_its_progress_and_is_retried_at_once() -> None:
    plane = restored(busy_plane())
    ejection = plane.fleet.engines[D2].ejection
    assert ejection is not None
    assert (ejection.cause, ejection.detail, ejection.since) == ("operator", "bob: smells", NOW - 40)
    assert (ejection.attempts, ejection.last_step, ejection.last_reason) == (1, "kv_transfer", "no partner")
    assert plane.fleet.readmission.take_due(now=NOW) == [D2]


def test_an_attempt_that_was_under_way_is_made_again() -> None:
    plane = busy_plane()
    plane.fleet.readmission.take_due(now=2000.0)
    assert restored(plane).fleet.readmission.take_due(now=NOW) == [D2]


def test_a_quarantine_keeps_its_remaining_time() -> None:
    plane = make_plane(recovery={"failure_quarantine_s": 60.0})
    for _ in range(3):
        plane.apply(LegFailed(D1, Leg.DECODE, F.OVERLOAD), now=THEN - 20)
    hold = restored(plane).fleet.engines[D1].holds[HoldKind.FAILURE_QUARANTINE]
    assert (hold.since, hold.until) == (NOW - 20, NOW + 40)


def test_a_document_that_was_some_time_on_its_way_is_restored_as_of_its_writing() -> None:
    """`now` is the instant of the writing as the reader knows it: ages go on while nobody holds."""
    plane = make_plane(recovery={"failure_quarantine_s": 60.0})
    for _ in range(3):
        plane.apply(LegFailed(D1, Leg.DECODE, F.OVERLOAD), now=THEN)
    other = restored(plane, now=NOW - 5)
    assert other.fleet.engines[D1].eligible(NOW + 55)
    assert not other.fleet.engines[D1].eligible(NOW + 54)


def test_a_verification_survives_and_its_probe_is_due_at_once_with_its_partner() -> None:
    plane = restored(busy_plane())
    assert not plane.fleet.engines[D1].eligible(NOW)
    (order,) = plane.fleet.probing.due(now=NOW)
    assert (order.engine, order.kind, order.partner, order.cause) == (D1, ProbeKind.INFERENCE, P2, F.STREAM)


def test_the_back_off_of_a_probe_goes_on() -> None:
    plane = restored(busy_plane())
    plane.fleet.probing.due(now=NOW)
    plane.apply(InferenceProbed(D1, (unclear(P2, D1),)), now=NOW)
    assert plane.fleet.engines[D1].holds[HoldKind.INFERENCE_VERIFICATION].attempts == 2


def test_streaks_survive_so_that_a_takeover_gives_no_fresh_start() -> None:
    plane = restored(busy_plane())
    streaks = plane.fleet.engines[P2].streaks
    assert streaks.by_class == {F.TIMEOUT: 1}
    assert streaks.by_leg == {(F.TIMEOUT, Leg.PREFILL): 1, (F.KV_HANDOFF, Leg.DECODE): 3}


def test_a_pair_that_fails_together_is_found_over_a_takeover() -> None:
    plane = make_plane()
    for _ in range(2):
        plane.apply(LegFailed(D1, Leg.DECODE, F.STREAM, P1), now=940.0)
        plane.apply(LegSucceeded(D1, Leg.DECODE, P2), now=941.0)
        plane.apply(LegSucceeded(D2, Leg.DECODE, P1), now=942.0)
    after = restored(plane)
    assert after.fleet.pairs.streaks == plane.fleet.pairs.streaks == {(P1, D1): 2}
    assert any(isinstance(d, HoldPlaced) for d in after.apply(LegFailed(D1, Leg.DECODE, F.STREAM, P1), now=NOW))


def test_a_leg_that_was_excused_once_is_not_excused_again_by_the_next_router() -> None:
    plane = make_plane()
    plane.fleet.engines[P1].streaks.excused.add(Leg.PREFILL)
    assert restored(plane).fleet.engines[P1].streaks.excused == {Leg.PREFILL}


def test_a_pair_that_is_kept_apart_survives_and_is_probed_as_soon_as_its_engines_can_be_used() -> None:
    plane = restored(busy_plane())
    ((pair, apart),) = plane.fleet.pairs.apart.items()
    assert (pair, apart.since, apart.due_at, apart.attempts) == ((P1, D1), NOW - 45, NOW, 1)


def test_generations_survive() -> None:
    assert restored(busy_plane()).fleet.engines[P2].generation == "g1"


def test_what_is_in_flight_belongs_to_the_process_and_does_not_survive() -> None:
    plane = restored(busy_plane())
    assert plane.fleet.engines[P2].resident == 0


def test_what_is_in_flight_here_is_not_lost_by_a_restore() -> None:
    plane = make_plane()
    plane.apply(LegStarted(P2, Leg.PREFILL), now=NOW)
    plane.restore(written(busy_plane()), now=NOW)
    assert plane.fleet.engines[P2].inflight[Leg.PREFILL] == 1


def test_roles_survive_and_placement_follows_them() -> None:
    plane = busy_plane()
    plane.fleet.engines[D2].role = Role.PREFILL
    other = restored(plane)
    assert other.fleet.engines[D2].role is Role.PREFILL
    assert other.fleet.engines[D2] in other.fleet.by_role[Role.PREFILL]
    assert other.fleet.engines[D2] not in other.fleet.by_role[Role.DECODE]


def test_the_age_of_a_consolidation_risk_survives() -> None:
    assert restored(busy_plane()).controller.risk_since == {Role.PREFILL: NOW - 15, Role.DECODE: NOW - 15}


def test_a_risk_that_is_over_is_forgotten() -> None:
    plane = make_plane()
    plane.controller.risk_since[Role.DECODE] = 1.0
    plane.restore(written(make_plane()), now=NOW)
    assert plane.controller.risk_since == {}


def test_counters_survive_and_never_go_back() -> None:
    plane = make_plane()
    plane.counters.add(CounterName.MONITOR_PASSES, 50)
    plane.restore(written(busy_plane()), now=NOW)
    assert plane.counters.values[CounterName.TAKEOVERS] == 4
    assert plane.counters.values[CounterName.MONITOR_PASSES] == 50


def test_an_unknown_counter_is_kept() -> None:
    document = written(busy_plane()).model_copy(update={"counters": {"from_the_future": 3}})
    plane = make_plane()
    plane.restore(document, now=NOW)
    assert written(plane).counters["from_the_future"] == 3


@pytest.mark.parametrize(("own", "expected"), [(1, 3), (9, 9)])
def test_the_version_goes_on_from_the_higher_one(own: int, expected: int) -> None:
    plane = make_plane()
    plane.version = own
    plane.restore(written(busy_plane()), now=NOW)
    assert plane.version == expected


def test_what_the_document_does_not_say_is_undone() -> None:
    plane = busy_plane()
    plane.restore(written(make_plane(), now=THEN), now=THEN)
    assert all(engine.eligible(THEN) for engine in plane.fleet.engines.values())
    assert all(not engine.probes and not engine.streaks.by_leg for engine in plane.fleet.engines.values())
    assert plane.fleet.pairs.apart == {}
    assert plane.fleet.pairs.streaks == {}
