"""Any sequence of passes over the monitoring streak, against the rule in one sentence each."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from narwhal.core.events import MonitoringDegraded, MonitoringRecovered
from narwhal.core.monitoring import Monitoring
from narwhal.core.vocabulary import Stage

outcomes = st.sampled_from([None, None, None, "OSError", "TimeoutError"])


class MonitoringMachine(RuleBasedStateMachine):
    """The model remembers whole passes and derives everything from them."""

    def __init__(self) -> None:
        super().__init__()
        self.monitoring = Monitoring(3)
        self.history: list[dict[Stage, str | None]] = []

    @initialize(limit=st.integers(1, 4))
    def start(self, limit: int) -> None:
        self.monitoring = Monitoring(limit)

    @rule(results=st.dictionaries(st.sampled_from(Stage), outcomes))
    def a_pass_ends(self, results: dict[Stage, str | None]) -> None:
        self.finish(results)

    @rule()
    def a_clean_pass_ends(self) -> None:
        self.finish(dict.fromkeys(Stage))
        assert self.monitoring.clean

    @rule(stage=st.sampled_from(Stage), error=st.sampled_from(["OSError", "TimeoutError"]), times=st.integers(1, 5))
    def one_stage_keeps_failing(self, stage: Stage, error: str, times: int) -> None:
        for _ in range(times):
            self.finish({**dict.fromkeys(Stage), stage: error})

    def finish(self, results: dict[Stage, str | None]) -> None:
        was_degraded = self.monitoring.degraded is not None
        changes = self.monitoring.finish_pass(results)
        self.history.append(results)
        is_degraded = self.monitoring.degraded is not None
        said = [type(change) for change in changes]
        assert said == {
            (False, True): [MonitoringDegraded],
            (True, False): [MonitoringRecovered],
        }.get((was_degraded, is_degraded), [])

    def streak(self) -> int:
        """Failed passes since the last fully successful one."""
        count = 0
        for index, results in enumerate(self.history):
            if any(results.values()):
                count += 1
            elif not self.failing_after(index):
                count = 0
        return count

    def failing_after(self, index: int) -> bool:
        """Whether some stage's newest run up to pass `index` failed."""
        newest: dict[Stage, str | None] = {}
        for results in self.history[: index + 1]:
            newest |= results
        return any(newest.values())

    @invariant()
    def the_streak_counts_failed_passes_since_the_last_fully_successful_one(self) -> None:
        assert self.monitoring.streak == self.streak()
        assert self.monitoring.clean == (self.streak() == 0)

    @invariant()
    def the_router_is_degraded_exactly_at_the_limit_and_names_the_newest_failure(self) -> None:
        if self.streak() < self.monitoring.failure_limit:
            assert self.monitoring.degraded is None
            return
        newest = next(results for results in reversed(self.history) if any(results.values()))
        stage = next(stage for stage in Stage if newest.get(stage) is not None)
        assert self.monitoring.degraded == f"{stage} {newest[stage]}"

    @invariant()
    def every_failure_was_counted(self) -> None:
        expected = sum(error is not None for results in self.history for error in results.values())
        assert self.monitoring.failures.total() == expected
        assert self.monitoring.passes == len(self.history)


MonitoringMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestMonitoring = MonitoringMachine.TestCase
