"""The monitoring streak: what adds to it, what clears it, and what a degraded router says."""

from __future__ import annotations

import pytest

from narwhal.core.events import MonitoringDegraded, MonitoringRecovered
from narwhal.core.monitoring import Monitoring
from narwhal.core.vocabulary import Stage

S = Stage


def passes(monitoring: Monitoring, *results: dict[Stage, str | None]) -> list[object]:
    return [change for result in results for change in monitoring.finish_pass(result)]


CLEAN: dict[Stage, str | None] = dict.fromkeys(Stage)
WITHOUT_LIVENESS: dict[Stage, str | None] = {stage: None for stage in Stage if stage is not S.LIVENESS}


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_admission_closes_at_the_limit_and_not_before(limit: int) -> None:
    monitoring = Monitoring(limit)
    assert passes(monitoring, *[{**CLEAN, S.HEALTH: "OSError"}] * (limit - 1)) == []
    assert monitoring.degraded is None
    assert monitoring.finish_pass({**CLEAN, S.HEALTH: "OSError"}) == [MonitoringDegraded(S.HEALTH, "OSError", limit)]
    assert monitoring.degraded == "health OSError"


@pytest.mark.parametrize("stage", Stage)
def test_any_failing_stage_adds_to_the_streak(stage: Stage) -> None:
    monitoring = Monitoring(2)
    passes(monitoring, *[{**CLEAN, stage: "ValueError"}] * 2)
    assert monitoring.degraded == f"{stage} ValueError"


def test_several_failing_stages_make_one_failed_pass() -> None:
    monitoring = Monitoring(3)
    passes(monitoring, dict.fromkeys(Stage, "OSError"))
    assert monitoring.streak == 1


def test_different_stages_failing_in_turn_degrade() -> None:
    monitoring = Monitoring(3)
    passes(monitoring, *({**CLEAN, stage: "OSError"} for stage in (S.HEALTH, S.DRAINS, S.HANDOFF)))
    assert monitoring.degraded == "handoff OSError"


def test_one_fully_successful_pass_recovers() -> None:
    monitoring = Monitoring(1)
    passes(monitoring, {**CLEAN, S.HEALTH: "OSError"})
    assert monitoring.finish_pass(CLEAN) == [MonitoringRecovered()]
    assert monitoring.degraded is None
    assert monitoring.streak == 0


def test_a_successful_pass_below_the_limit_clears_without_a_word() -> None:
    monitoring = Monitoring(3)
    assert passes(monitoring, {**CLEAN, S.HEALTH: "OSError"}, CLEAN, {**CLEAN, S.HEALTH: "OSError"}) == []
    assert monitoring.streak == 1


def test_the_first_failing_stage_of_the_newest_failed_pass_is_named() -> None:
    monitoring = Monitoring(2)
    passes(
        monitoring,
        {**CLEAN, S.CONTROLLER: "KeyError"},
        {**CLEAN, S.HANDOFF: "OSError", S.LIVENESS: "TimeoutError"},
    )
    assert monitoring.degraded == "liveness TimeoutError"


def test_degradation_and_recovery_are_said_once() -> None:
    monitoring = Monitoring(2)
    failed = {**CLEAN, S.HEALTH: "OSError"}
    assert len(passes(monitoring, *[failed] * 5)) == 1
    assert len(passes(monitoring, CLEAN, CLEAN)) == 1


def test_a_stage_that_runs_rarely_and_fails_each_time_still_degrades() -> None:
    """Nine passes without the sweep between two failed ones must not wipe its record."""
    monitoring = Monitoring(3)
    for _ in range(3):
        passes(monitoring, {**CLEAN, S.LIVENESS: "TimeoutError"}, *[WITHOUT_LIVENESS] * 9)
    assert monitoring.degraded == "liveness TimeoutError"


def test_a_pass_without_the_failing_stage_neither_adds_nor_clears() -> None:
    monitoring = Monitoring(3)
    passes(monitoring, {**CLEAN, S.LIVENESS: "TimeoutError"}, *[WITHOUT_LIVENESS] * 9)
    assert monitoring.streak == 1
    assert not monitoring.clean


def test_the_failing_stage_clears_when_it_is_due_again_and_succeeds() -> None:
    monitoring = Monitoring(1)
    passes(monitoring, {**CLEAN, S.LIVENESS: "TimeoutError"}, WITHOUT_LIVENESS)
    assert monitoring.degraded is not None
    assert monitoring.finish_pass(CLEAN) == [MonitoringRecovered()]


def test_another_failure_meanwhile_adds_and_takes_over_the_name() -> None:
    monitoring = Monitoring(2)
    passes(monitoring, {**CLEAN, S.LIVENESS: "TimeoutError"}, {**WITHOUT_LIVENESS, S.HEALTH: "OSError"})
    assert monitoring.degraded == "health OSError"
    passes(monitoring, WITHOUT_LIVENESS)
    assert monitoring.degraded == "health OSError"
    passes(monitoring, CLEAN)
    assert monitoring.degraded is None


def test_every_failure_is_counted_by_stage_and_class() -> None:
    monitoring = Monitoring(9)
    failed: dict[Stage, str | None] = {S.HEALTH: "OSError", S.LIVENESS: "TimeoutError"}
    passes(monitoring, failed, {S.HEALTH: "OSError"}, CLEAN)
    assert monitoring.failures == {(S.HEALTH, "OSError"): 2, (S.LIVENESS, "TimeoutError"): 1}
    assert monitoring.passes == 3


def test_a_restart_begins_afresh() -> None:
    assert Monitoring(1).degraded is None
    assert Monitoring(1).clean
