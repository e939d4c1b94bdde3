"""The one answer to /ready and to admission: every row of its table, and which row wins."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from narwhal.core import readiness
from narwhal.core.control_plane import ControlPlane
from narwhal.core.events import DrainOrdered
from narwhal.core.readiness import Readiness
from narwhal.core.vocabulary import EngineId, Role, RouterRole, Stage
from tests.core.fleets import D1, D2, P1, P2, make_plane
from tests.core.leases import make_lease

NOW, LEASE_NOW = 1000.0, 5000.0


def active() -> ControlPlane:
    plane = make_plane()
    plane.tenure.granted(make_lease(), sent_at=LEASE_NOW)
    plane.role = RouterRole.ACTIVE
    plane.ineligible = None
    return plane


def ask(plane: ControlPlane) -> Readiness:
    return plane.readiness(now=NOW, lease_now=LEASE_NOW + 1.0)


def drain(plane: ControlPlane, *engines: EngineId) -> ControlPlane:
    for engine in engines:
        plane.apply(DrainOrdered(engine, "op", "test"), now=NOW)
    return plane


def stop(plane: ControlPlane) -> ControlPlane:
    plane.stopping = True
    return plane


def follow(plane: ControlPlane, why_not: str | None) -> ControlPlane:
    plane.role = RouterRole.STANDBY
    plane.ineligible = why_not
    return plane


def fence(plane: ControlPlane, why: str) -> ControlPlane:
    plane.role = RouterRole.FENCED
    plane.tenure.fence(why)
    return plane


def degrade(plane: ControlPlane) -> ControlPlane:
    for _ in range(plane.monitoring.failure_limit):
        plane.monitoring.finish_pass({Stage.HEALTH: "TimeoutError"})
    return plane


def alone(plane: ControlPlane) -> ControlPlane:
    plane.tenure.fence("test")
    plane.tenure.solo()
    plane.role = RouterRole.SOLO
    return plane


def past_deadline(plane: ControlPlane) -> ControlPlane:
    plane.tenure.valid_until = LEASE_NOW
    return plane


Change = Callable[[ControlPlane], ControlPlane]

ROWS: list[tuple[str, Change, str, bool, bool]] = [
    ("active", lambda p: p, "active", True, True),
    ("solo", alone, "active", True, True),
    ("stopping", stop, "stopping", False, True),
    ("standby", lambda p: follow(p, None), "standby", False, True),
    (
        "standby with a reason",
        lambda p: follow(p, "no healthy decode engine"),
        "standby: no healthy decode engine",
        False,
        True,
    ),
    ("standby with a failing monitor", lambda p: degrade(follow(p, None)), "standby", False, False),
    ("fenced", lambda p: fence(p, "lease lost"), "fenced: lease lost", False, False),
    ("past the deadline", past_deadline, "fenced: the local lease deadline has passed", False, False),
    ("degraded", degrade, "monitoring degraded: health TimeoutError", False, False),
    ("no prefill", lambda p: drain(p, P1, P2), "no eligible prefill engine", False, True),
    ("no decode", lambda p: drain(p, D1, D2), "no eligible decode engine", False, True),
    ("nobody", lambda p: drain(p, P1, P2, D1, D2), "no eligible prefill and decode engines", False, True),
]


@pytest.mark.parametrize(
    ("change", "reason", "ready", "control_ready"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_each_state_has_its_answer(change: Change, reason: str, ready: bool, control_ready: bool) -> None:
    assert ask(change(active())) == Readiness(ready=ready, reason=reason, control_ready=control_ready)


def test_a_router_that_has_not_started_is_a_standby_that_says_so() -> None:
    assert ask(make_plane()).reason == "standby: starting"


def test_a_fenced_router_that_never_had_a_term_says_that_it_has_no_lease() -> None:
    plane = make_plane()
    plane.role = RouterRole.FENCED
    assert ask(plane).reason == "fenced: no lease"


def test_the_first_reason_in_the_order_of_precedence_is_given() -> None:
    """Each step removes the cause that won; what is left below it must show."""
    plane = drain(degrade(active()), P1, P2)
    plane.tenure.valid_until = LEASE_NOW
    plane.stopping = True
    plane.role = RouterRole.STANDBY
    reasons = [ask(plane).reason]
    plane.stopping = False
    reasons.append(ask(plane).reason.partition(":")[0])
    plane.role = RouterRole.FENCED
    reasons.append(ask(plane).reason)
    plane.role = RouterRole.ACTIVE
    reasons.append(ask(plane).reason)
    plane.tenure.valid_until = LEASE_NOW + 10
    reasons.append(ask(plane).reason)
    plane.monitoring.finish_pass({Stage.HEALTH: None})
    reasons.append(ask(plane).reason)
    assert reasons == [
        "stopping",
        "standby",
        "fenced: no lease",
        "fenced: the local lease deadline has passed",
        "monitoring degraded: health TimeoutError",
        "no eligible prefill engine",
    ]


def test_only_a_router_with_fit_control_and_engines_is_ready() -> None:
    answers = [ask(change(active())) for _, change, *_ in ROWS]
    assert [answer.reason for answer in answers if answer.ready] == ["active", "active"]
    assert all(answer.control_ready for answer in answers if answer.ready)


def test_the_documented_table_names_every_form_of_reason() -> None:
    assert readiness.__doc__ is not None
    documented = re.findall(r"`([^`]+)`", readiness.__doc__)
    forms = [
        re.compile(re.sub(r"\\?<[^>]+>", ".+", re.escape(form).replace(r"\<", "<").replace(r"\>", ">")) + "$")
        for form in documented
    ]
    for reason in {row[2] for row in ROWS}:
        assert any(form.match(reason) for form in forms), reason


@pytest.mark.parametrize("roles", [(Role.PREFILL,), (Role.DECODE,), (Role.PREFILL, Role.DECODE)])
def test_missing_capacity_is_not_the_fault_of_the_control(roles: tuple[Role, ...]) -> None:
    assert readiness.exhausted(roles).control_ready
