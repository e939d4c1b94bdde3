"""Every ordered probe is carried out on the control pool and reported exactly once, whatever becomes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from narwhal.core.events import FleetEvent, HealthProbed, InferenceProbed, PairFinding, ProbeOrdered
from narwhal.core.vocabulary import EngineId, FailureClass, Leg, ProbeKind, ProbeResult
from narwhal.monitor.probe_runner import ProbeRunner
from narwhal.testing.memory_engines import Condition, MemoryEngines
from tests.core.fleets import D1, D2, P1, P2, entries, make_plane
from tests.ha.parts import now
from tests.virtual import virtual


class Probing:
    """A runner whose reports are collected."""

    def __init__(self) -> None:
        self.plane = make_plane()
        self.engines = MemoryEngines((entry.id, entry.role) for entry in entries())
        self.runner = ProbeRunner(self.plane, self.engines)
        self.reports: list[FleetEvent] = []
        self.runner.report = self.reports.append

    async def carry_out(self, order: ProbeOrdered, *, within_s: float = 60) -> FleetEvent:
        self.runner.start(order)
        async with asyncio.timeout(within_s):
            while not self.reports:
                await asyncio.sleep(0.001)
        (report,) = self.reports
        return report


def health(engine: EngineId, *, number: int = 1) -> ProbeOrdered:
    return ProbeOrdered(engine, ProbeKind.HEALTH, None, FailureClass.TIMEOUT, number)


def inference(engine: EngineId, partner: EngineId | None = None, *, number: int = 1) -> ProbeOrdered:
    return ProbeOrdered(engine, ProbeKind.INFERENCE, partner, FailureClass.STREAM, number)


@pytest.mark.parametrize(
    ("condition", "result"),
    [
        (Condition.WELL, ProbeResult.PASSED),
        (Condition.SICK, ProbeResult.PASSED),
        (Condition.GONE, ProbeResult.FAILED),
        (Condition.HUNG, ProbeResult.FAILED),
        (Condition.UNHEALTHY, ProbeResult.FAILED),
    ],
)
@virtual
async def test_a_health_probe_reports_what_health_says(condition: Condition, result: ProbeResult) -> None:
    probing = Probing()
    probing.engines[P1].condition = condition
    report = await probing.carry_out(health(P1, number=7))
    assert isinstance(report, HealthProbed)
    assert (report.engine, report.result, report.number) == (P1, result, 7)


@virtual
async def test_a_full_pool_of_our_own_makes_a_probe_inconclusive() -> None:
    probing = Probing()
    probing.engines.full = True
    report = await probing.carry_out(health(P1))
    assert isinstance(report, HealthProbed)
    assert report.result is ProbeResult.INCONCLUSIVE


@virtual
async def test_an_inference_probe_tries_the_recorded_partner_first_and_stops_when_the_suspect_served() -> None:
    probing = Probing()
    report = await probing.carry_out(inference(P1, D2, number=4))
    assert report == InferenceProbed(P1, (PairFinding(P1, D2),), 4)


@virtual
async def test_an_inference_probe_tries_another_partner_when_the_recorded_pair_fails() -> None:
    probing = Probing()
    probing.engines[P1].poisons = {D2}
    report = await probing.carry_out(inference(P1, D2))
    assert isinstance(report, InferenceProbed)
    assert [(f.prefill, f.decode, f.failed_leg) for f in report.findings] == [(P1, D2, Leg.DECODE), (P1, D1, None)]


@pytest.mark.parametrize("method", ["health", "infer"])
@virtual
async def test_a_probe_that_crashes_is_reported_as_inconclusive_and_logged(method: str) -> None:
    probing = Probing()
    probing.engines.crashing[method] = RuntimeError("a bug")
    order = health(P1, number=3) if method == "health" else inference(P1, number=3)
    with capture_logs() as logs:
        report = await probing.carry_out(order)
    assert_learnt_nothing(report, number=3)
    assert [line["event"] for line in logs] == ["probe_crashed"]
    assert "a bug" in logs[0]["error"]


def assert_learnt_nothing(report: FleetEvent, *, number: int) -> None:
    assert isinstance(report, HealthProbed | InferenceProbed)
    assert report.number == number
    if isinstance(report, HealthProbed):
        assert report.result is ProbeResult.INCONCLUSIVE
    else:
        assert report.findings == ()


@pytest.mark.parametrize("after_s", [None, 0.0, 0.001, 1.0])
@pytest.mark.parametrize("order", [health(P1, number=5), inference(P1, number=5)], ids=["health", "inference"])
@virtual
async def test_a_cancelled_probe_is_reported_even_if_it_had_not_begun(order: ProbeOrdered, after_s: Any) -> None:
    probing = Probing()
    probing.engines[P1].condition = Condition.HUNG
    probing.runner.start(order)
    if after_s is not None:
        await asyncio.sleep(after_s)
    await probing.runner.cancel()
    await asyncio.sleep(0)
    (report,) = probing.reports
    assert_learnt_nothing(report, number=5)


@virtual
async def test_probes_of_different_engines_run_side_by_side() -> None:
    probing = Probing()
    probing.engines[P1].condition = probing.engines[P2].condition = Condition.HUNG
    for engine in (P1, P2, D1):
        probing.runner.start(health(engine))
    await asyncio.sleep(probing.plane.config.engine.health_timeout_s + 0.01)
    assert {report.engine for report in probing.reports} == {P1, P2, D1}
    assert probing.reports[0].engine == D1
    assert now() < 2.1


def test_a_runner_without_a_way_back_says_so() -> None:
    runner = ProbeRunner(make_plane(), MemoryEngines([]))
    with pytest.raises(AssertionError, match="no reporter"):
        runner.report(HealthProbed(P1, ProbeResult.PASSED))
