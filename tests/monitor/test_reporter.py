"""Whatever happens goes one way into the core, and each decision is logged, told and carried out once."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from narwhal.core.events import (
    Decision,
    DrainOrdered,
    EngineEjected,
    HealthAnswered,
    HoldPlaced,
    LegFailed,
    LegStarted,
    MonitoringDegraded,
    ProbeJudged,
    ProbeOrdered,
)
from narwhal.core.vocabulary import EjectionCause, FailureClass, Leg, ProbeKind, ProbeResult, Stage
from narwhal.monitor.reporter import Reporter, event_name
from tests.core.fleets import D1, P1, make_plane
from tests.virtual import virtual


class Told:
    """A reporter whose probes are collected."""

    def __init__(self) -> None:
        self.plane = make_plane()
        self.probes: list[ProbeOrdered] = []
        self.reporter = Reporter(self.plane, start_probe=self.probes.append)


FAILED = LegFailed(D1, Leg.DECODE, FailureClass.STREAM, P1, "silence")


def test_a_decision_is_named_in_the_log_as_it_is_in_the_code() -> None:
    assert event_name(EngineEjected(P1, EjectionCause.LIVENESS, 3)) == "engine_ejected"
    assert event_name(ProbeOrdered(P1, ProbeKind.HEALTH, None, None)) == "probe_ordered"


@virtual
async def test_a_decision_is_logged_with_its_facts() -> None:
    told = Told()
    with capture_logs() as logs:
        told.reporter.report(DrainOrdered(P1, "op", "maintenance"))
    assert logs == [
        {"event": "hold_placed", "engine": P1, "kind": "operator_drain", "reason": "maintenance", "log_level": "info"}
    ]


@virtual
async def test_bad_news_is_logged_as_a_warning() -> None:
    told = Told()
    with capture_logs() as logs:
        told.reporter.carry_out(
            [
                EngineEjected(P1, EjectionCause.LIVENESS, 3),
                MonitoringDegraded(Stage.HEALTH, "OSError", 3),
                ProbeJudged(P1, ProbeKind.HEALTH, ProbeResult.FAILED),
                ProbeJudged(P1, ProbeKind.HEALTH, ProbeResult.PASSED),
            ]
        )
    assert [line["log_level"] for line in logs] == ["warning", "warning", "warning", "info"]


@virtual
async def test_an_ordered_probe_starts_within_the_report_so_that_nothing_slips_in_between() -> None:
    told = Told()
    for _ in range(3):
        told.reporter.report(FAILED)
    assert [(order.engine, order.kind) for order in told.probes] == [(D1, ProbeKind.INFERENCE)]
    assert not told.plane.fleet.engines[D1].eligible(0.0)


@virtual
async def test_every_watcher_sees_every_decision_in_order() -> None:
    told = Told()
    seen: list[list[Decision]] = [[], []]
    for decisions in seen:
        told.reporter.watch(decisions.append)
    for _ in range(3):
        told.reporter.report(FAILED)
    assert seen[0] == seen[1]
    assert [type(decision) for decision in seen[0]] == [HoldPlaced, ProbeOrdered]


@virtual
async def test_a_change_that_a_handoff_should_carry_is_marked() -> None:
    told = Told()
    told.reporter.report(DrainOrdered(P1, "op", ""))
    assert told.reporter.changed.is_set()


@virtual
async def test_everyday_events_mark_nothing() -> None:
    told = Told()
    told.reporter.report(LegStarted(P1, Leg.PREFILL))
    told.reporter.report(FAILED)
    told.reporter.report(HealthAnswered(P1))
    assert not told.reporter.changed.is_set()


@virtual
async def test_an_event_happens_at_the_time_of_the_loop() -> None:
    told = Told()
    await asyncio.sleep(123)
    told.reporter.report(DrainOrdered(P1, "op", ""))
    (hold,) = told.plane.fleet.engines[P1].holds.values()
    assert hold.since == 123
