"""What each stage of a pass does, by name."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from narwhal.core.events import (
    ConsolidationRiskChanged,
    DrainOrdered,
    DrainSettled,
    EjectionOrdered,
    EngineEjected,
    EngineReadmitted,
    HoldLifted,
    HoldPlaced,
    LegFailed,
    LegReleased,
    LegStarted,
    LegSucceeded,
    ProbeJudged,
)
from narwhal.core.vocabulary import EjectionCause, EngineId, FailureClass, HoldKind, Leg, ProbeResult, Role, Stage
from narwhal.monitor.stages import WARM_STAGES
from narwhal.testing.memory_engines import Condition
from tests.core.fleets import D1, D2, P1, P2
from tests.ha.parts import now, until
from tests.monitor.parts import Monitored
from tests.virtual import virtual


async def serving(**sections: dict[str, Any]) -> Monitored:
    a = Monitored(**sections)
    await a.serve()
    return a


def stages_due(a: Monitored) -> set[Stage]:
    return {stage for stage, _ in a.stages.due(now=now())}


def fail(a: Monitored, engine: EngineId, failure_class: FailureClass, *, times: int = 3) -> None:
    leg = Leg(a.plane.fleet.engines[engine].role.value)
    for _ in range(times):
        a.report(LegFailed(engine, leg, failure_class))


# controller


@virtual
async def test_controller_names_a_role_that_rests_on_one_engine_and_when_it_no_longer_does() -> None:
    a = await serving()
    a.report(DrainOrdered(P1, "op", ""))
    await a.run_stage(Stage.CONTROLLER)
    assert a.decided(ConsolidationRiskChanged) == [ConsolidationRiskChanged(Role.PREFILL, at_risk=True)]
    a.report(EjectionOrdered(P2, "op", ""))
    await a.run_stage(Stage.CONTROLLER)
    assert len(a.decided(ConsolidationRiskChanged)) == 1


# health


@virtual
async def test_health_ends_the_evidence_that_health_ends() -> None:
    a = await serving()
    fail(a, D1, FailureClass.TIMEOUT, times=2)
    await a.run_stage(Stage.HEALTH)
    assert a.plane.fleet.engines[D1].streaks.nonzero() == frozenset()


@virtual
async def test_health_that_is_not_answered_is_no_evidence_by_itself() -> None:
    a = await serving()
    a.engines[D1].condition = Condition.GONE
    await a.run_stage(Stage.HEALTH)
    assert a.stages.views[D1].healthy is False
    assert a.plane.fleet.engines[D1].eligible(now())


@virtual
async def test_a_full_pool_of_our_own_changes_no_view_of_an_engine() -> None:
    a = await serving()
    await a.run_stage(Stage.HEALTH)
    a.engines.full = True
    await a.run_stage(Stage.HEALTH)
    assert a.stages.views[D1].healthy is True


@virtual
async def test_health_ends_a_quarantine_whose_time_is_over_although_every_health_check_crashes() -> None:
    a = await serving(recovery={"failure_quarantine_s": 5.0})
    fail(a, D1, FailureClass.OVERLOAD)
    assert HoldKind.FAILURE_QUARANTINE in a.plane.fleet.engines[D1].holds
    a.engines.crashing["health"] = RuntimeError("a bug")
    await asyncio.sleep(5.1)
    with pytest.raises(RuntimeError):
        await a.run_stage(Stage.HEALTH)
    assert HoldLifted(D1, HoldKind.FAILURE_QUARANTINE, "deadline passed") in a.decisions


@virtual
async def test_health_starts_an_inconclusive_probe_again_when_it_is_due() -> None:
    a = await serving()
    a.engines.full = True
    fail(a, D1, FailureClass.STREAM)
    await asyncio.sleep(0.01)
    assert [judged.result for judged in a.decided(ProbeJudged)] == [ProbeResult.INCONCLUSIVE]  # type: ignore[union-attr]
    a.engines.full = False
    await a.run_stage(Stage.HEALTH)
    assert len(a.decided(ProbeJudged)) == 1, "the next one is not due yet"
    await asyncio.sleep(1)
    await a.run_stage(Stage.HEALTH)
    await asyncio.sleep(0.01)
    assert [judged.result for judged in a.decided(ProbeJudged)][1:] == [ProbeResult.PASSED]  # type: ignore[union-attr]
    assert a.plane.fleet.engines[D1].eligible(now())


# drains


@virtual
async def test_drains_say_once_that_the_last_resident_leg_has_ended() -> None:
    a = await serving()
    a.report(LegStarted(P1, Leg.PREFILL), DrainOrdered(P1, "op", ""))
    await a.run_stage(Stage.DRAINS)
    assert a.decided(DrainSettled) == []
    a.report(LegReleased(P1, Leg.PREFILL))
    for _ in range(3):
        await a.run_stage(Stage.DRAINS)
    assert a.decided(DrainSettled) == [DrainSettled(P1)]


# rollover


@virtual
async def test_rollover_begins_a_new_interval_when_the_old_one_is_over() -> None:
    a = await serving()
    await a.run_stage(Stage.ROLLOVER)
    a.report(LegSucceeded(P1, Leg.PREFILL))
    await asyncio.sleep(9)
    await a.run_stage(Stage.ROLLOVER)
    assert a.plane.fleet.engines[P1].interval.succeeded == 1
    await asyncio.sleep(1)
    await a.run_stage(Stage.ROLLOVER)
    engine = a.plane.fleet.engines[P1]
    assert (engine.interval.succeeded, engine.last_interval.succeeded) == (0, 1)


# readmission


@virtual
async def test_readmission_brings_an_ejected_engine_back_beside_the_passes() -> None:
    a = await serving()
    a.report(EjectionOrdered(P1, "op", ""))
    await a.run_stage(Stage.READMISSION)
    assert now() < 0.1, "the stage does not wait for it"
    await until(lambda: a.decided(EngineReadmitted), within_s=1)
    assert a.plane.fleet.engines[P1].eligible(now())


@virtual
async def test_readmission_tries_again_with_growing_pauses() -> None:
    a = await serving()
    a.engines[P1].condition = Condition.SICK
    a.report(EjectionOrdered(P1, "op", ""))
    tries: list[float] = []
    async with a.running():
        for _ in range(4000):
            await asyncio.sleep(0.01)
            ejection = a.plane.fleet.engines[P1].ejection
            assert ejection is not None
            if len(tries) < ejection.attempts:
                tries.append(now())
    gaps = [round(b - a) for a, b in pairwise(tries)]
    assert gaps[:4] == [1, 2, 4, 8]


@virtual
async def test_a_crash_in_a_check_is_raised_by_the_next_run_of_the_stage_and_the_engine_is_tried_again() -> None:
    a = await serving()
    a.engines.crashing["models"] = RuntimeError("a bug")
    a.report(EjectionOrdered(P1, "op", ""))
    await a.run_stage(Stage.READMISSION)
    await asyncio.sleep(0.1)
    with pytest.raises(RuntimeError):
        await a.run_stage(Stage.READMISSION)
    a.engines.crashing.clear()
    await asyncio.sleep(1)
    await a.run_stage(Stage.READMISSION)
    await until(lambda: a.decided(EngineReadmitted), within_s=1)


# liveness


@virtual
async def test_liveness_ejects_after_the_configured_number_of_silent_sweeps() -> None:
    a = await serving()
    a.engines[P1].condition = Condition.UNHEALTHY
    for sweeps in range(3):
        assert len(a.decided(EngineEjected)) == 0, sweeps
        await a.run_stage(Stage.LIVENESS)
        await asyncio.sleep(5)
    (ejected,) = a.decided(EngineEjected)
    assert isinstance(ejected, EngineEjected)
    assert (ejected.engine, ejected.cause) == (P1, EjectionCause.LIVENESS)


@virtual
async def test_a_healthy_answer_to_a_sweep_starts_the_count_again() -> None:
    a = await serving()
    for condition in (Condition.GONE, Condition.GONE, Condition.WELL, Condition.GONE, Condition.GONE):
        a.engines[P1].condition = condition
        await a.run_stage(Stage.LIVENESS)
        await asyncio.sleep(5)
    assert a.decided(EngineEjected) == []


@virtual
async def test_our_own_full_pool_is_no_silence() -> None:
    a = await serving()
    a.engines.full = True
    for _ in range(5):
        await a.run_stage(Stage.LIVENESS)
        await asyncio.sleep(5)
    assert a.decided(EngineEjected) == []


@virtual
async def test_sweeps_are_due_at_their_own_rate() -> None:
    a = await serving()
    due = []
    for second in range(12):
        if Stage.LIVENESS in stages_due(a):
            due.append(second)
        await asyncio.sleep(1)
    assert due == [0, 5, 10]


@virtual
async def test_an_engine_that_hangs_is_found_in_every_sweep_although_a_look_may_last_as_long_as_a_sweep() -> None:
    a = await serving()
    a.engines[P1].condition = Condition.HUNG
    async with a.running():
        await until(lambda: a.decided(EngineEjected), within_s=60)
    assert now() < 3 * 5.0 + 1


# telemetry


@virtual
async def test_telemetry_notices_a_new_process_behind_the_address() -> None:
    a = await serving()
    await a.run_stage(Stage.TELEMETRY)
    a.engines[D1].restart()
    await asyncio.sleep(5)
    await a.run_stage(Stage.TELEMETRY)
    (ejected,) = a.decided(EngineEjected)
    assert isinstance(ejected, EngineEjected)
    assert (ejected.engine, ejected.cause) == (D1, EjectionCause.GENERATION_CHANGED)


@virtual
async def test_telemetry_that_cannot_be_read_is_no_evidence() -> None:
    a = await serving()
    await a.run_stage(Stage.TELEMETRY)
    a.engines[D1].condition = Condition.GONE
    await asyncio.sleep(5)
    await a.run_stage(Stage.TELEMETRY)
    assert a.stages.views[D1].telemetry is None
    assert a.decided(EngineEjected) == []


@virtual
async def test_telemetry_keeps_the_model_cards_of_an_engine_that_no_longer_answers() -> None:
    a = await serving()
    await a.run_stage(Stage.TELEMETRY)
    assert len(a.stages.model_cards()) == 4
    a.engines[D1].condition = Condition.GONE
    await asyncio.sleep(5)
    await a.run_stage(Stage.TELEMETRY)
    assert len(a.stages.model_cards()) == 4


# handoff


@virtual
async def test_handoff_writes_every_pass() -> None:
    a = await serving()
    for version in (1, 2, 3):
        await a.run_stage(Stage.HANDOFF)
        document = a.shared.redis.get_handoff()
        assert document is not None
        assert document.version == version


@virtual
async def test_handoff_is_no_failure_of_a_router_whose_deadline_has_passed() -> None:
    a = await serving()
    a.plane.tenure.fence("test")
    await a.run_stage(Stage.HANDOFF)
    assert a.shared.redis.get_handoff() is None


# A standby


@virtual
async def test_a_standby_keeps_engines_in_view_and_decides_nothing() -> None:
    a = Monitored()
    a.engines[D1].condition = Condition.GONE
    fail(a, P1, FailureClass.TIMEOUT, times=2)
    async with a.running():
        await asyncio.sleep(30)
    assert stages_due(a) <= WARM_STAGES
    assert {name: view.healthy for name, view in a.stages.views.items()} == {P1: True, P2: True, D1: False, D2: True}
    assert a.decisions == []
    assert a.plane.fleet.engines[P1].streaks.nonzero() == {FailureClass.TIMEOUT}


@virtual
async def test_a_sweep_that_was_out_when_its_router_was_fenced_decides_nothing() -> None:
    a = await serving(recovery={"liveness_misses": 1})
    a.engines[P1].condition = Condition.HUNG
    await a.run_stage(Stage.LIVENESS)
    a.plane.role = type(a.plane.role).STANDBY
    await asyncio.sleep(10)
    assert a.decided(EngineEjected) == []


@virtual
async def test_a_standby_that_has_looked_at_no_engine_yet_could_not_serve() -> None:
    a = Monitored()
    assert a.stages.could_serve() == "no healthy prefill engine in view"
    await a.run_stage(Stage.HEALTH)
    assert a.stages.could_serve() is None


@pytest.mark.parametrize(("gone", "why"), [((P1, P2), "prefill"), ((D1, D2), "decode"), ((P1, D1), None)], ids=str)
@virtual
async def test_a_standby_could_serve_with_one_healthy_engine_of_each_role(
    gone: tuple[EngineId, ...], why: str | None
) -> None:
    a = Monitored()
    for engine in gone:
        a.engines[engine].condition = Condition.GONE
    await a.run_stage(Stage.HEALTH)
    assert a.stages.could_serve() == (why and f"no healthy {why} engine in view")


@virtual
async def test_a_router_that_becomes_active_probes_what_its_predecessor_held() -> None:
    first = await serving()
    first.engines.full = True
    fail(first, D1, FailureClass.STREAM)
    await first.writer.write()
    document = first.shared.redis.get_handoff()
    assert document is not None
    second = Monitored()
    second.plane.restore(document, now=now())
    assert not second.plane.fleet.engines[D1].eligible(now())
    await second.serve()
    await second.run_stage(Stage.HEALTH)
    await until(lambda: second.plane.fleet.engines[D1].eligible(now()), within_s=1)


@virtual
async def test_the_work_beside_the_passes_ends_with_the_loop() -> None:
    a = await serving()
    for engine in (P1, P2, D1, D2):
        a.engines[engine].condition = Condition.HUNG
    a.report(EjectionOrdered(P1, "op", ""))
    async with a.running():
        await asyncio.sleep(1.5)
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    assert HoldPlaced not in [type(decision) for decision in a.decisions]
