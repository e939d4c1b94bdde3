"""The control plane as a whole: its tallies, its answer to claims, its capped back-off."""

from __future__ import annotations

import pytest

from narwhal.core.backoff import delay_s
from narwhal.core.claims import Refuse, Yield, answer_claim
from narwhal.core.counters import CounterName
from narwhal.core.events import HealthProbed, LegFailed, ReadmissionPassed
from narwhal.core.lease import Claim
from narwhal.core.vocabulary import FailureClass, FencingToken, Leg, ProbeResult, RouterRole, Stage
from tests.core.fleets import D1, D2, P1, make_plane
from tests.core.leases import B, make_lease

F = FailureClass


def claim(token: int = 7) -> Claim:
    return Claim(B, "router-b-1", FencingToken(token), "3 bad signs in a row")


def test_what_is_decided_is_counted() -> None:
    plane = make_plane()
    for failure_class, engine, leg in [
        (F.CONNECTION, D1, Leg.DECODE),
        (F.KV_HANDOFF, P1, Leg.PREFILL),
        (F.TIMEOUT, D2, Leg.DECODE),
    ]:
        for _ in range(3):
            plane.apply(LegFailed(engine, leg, failure_class), now=1.0)
    plane.apply(HealthProbed(D2, ProbeResult.FAILED), now=1.0)
    plane.apply(ReadmissionPassed(D1, "g"), now=1.0)
    counted = {name: value for name, value in plane.counters.values.items() if value}
    assert counted == {
        CounterName.EJECTIONS: 2,
        CounterName.HOLDS_PLACED: 1,
        CounterName.PROBES_FAILED: 1,
        CounterName.READMISSIONS: 1,
    }


def test_every_tally_starts_at_zero() -> None:
    assert make_plane().counters.values == dict.fromkeys(CounterName, 0)


@pytest.mark.parametrize(
    ("role", "serving"),
    [(RouterRole.ACTIVE, True), (RouterRole.SOLO, True), (RouterRole.STANDBY, False), (RouterRole.FENCED, False)],
)
def test_only_an_active_or_a_lone_router_decides_about_the_fleet(role: RouterRole, serving: bool) -> None:
    plane = make_plane()
    plane.role = role
    assert plane.serving is serving


def test_a_fit_router_refuses_a_claim_and_says_so() -> None:
    plane = make_plane()
    plane.tenure.granted(make_lease(token=7), sent_at=0.0)
    assert answer_claim(plane, claim()) == Refuse("this router is fit")


def test_a_degraded_router_gives_way() -> None:
    plane = make_plane(controller={"monitor_failure_limit": 1})
    plane.tenure.granted(make_lease(token=7), sent_at=0.0)
    plane.monitoring.finish_pass({Stage.HANDOFF: "OSError"})
    assert answer_claim(plane, claim()) == Yield()


def test_a_claim_against_another_term_is_refused() -> None:
    plane = make_plane(controller={"monitor_failure_limit": 1})
    plane.tenure.granted(make_lease(token=8), sent_at=0.0)
    plane.monitoring.finish_pass({Stage.HANDOFF: "OSError"})
    assert answer_claim(plane, claim(7)) == Refuse("the claim is against token 7, not 8")


@pytest.mark.parametrize(
    ("attempts", "wait_s"), [(0, 1.0), (1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 10.0), (1000, 10.0)]
)
def test_the_back_off_doubles_up_to_its_cap(attempts: int, wait_s: float) -> None:
    assert delay_s(attempts, first_s=1.0, max_s=10.0) == wait_s
