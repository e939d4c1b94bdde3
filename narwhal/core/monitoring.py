"""From stage results to the monitoring streak, and from the streak to a degraded router.

A pass with a failed stage adds to the streak. A pass in which every due stage succeeded clears it, unless a stage that
was not due failed when it last ran: such a pass neither adds nor clears, so that a stage which runs rarely and fails
each time still degrades the router. A restarted router starts with fresh counters.
Source: source, "Monitoring and readiness"; decisions 4 and 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from narwhal.core.events import MonitoringDegraded, MonitoringRecovered
from narwhal.core.vocabulary import Stage

StageResults = Mapping[Stage, str | None]
"""For each stage that was due in a pass: None if it succeeded, else the class name of its exception."""


class Monitoring:
    """What the monitor knows of its own health."""

    __slots__ = ("_failing", "_label", "failure_limit", "failures", "passes", "streak")

    def __init__(self, failure_limit: int) -> None:
        self.failure_limit = failure_limit
        self.streak = 0
        self.passes = 0
        self.failures: Counter[tuple[Stage, str]] = Counter()
        self._failing: dict[Stage, str] = {}
        self._label: tuple[Stage, str] | None = None

    @property
    def degraded(self) -> str | None:
        """`<stage> <class>` of the newest failed pass while admission is closed, else None."""
        if self.streak < self.failure_limit or self._label is None:
            return None
        stage, error_class = self._label
        return f"{stage} {error_class}"

    @property
    def clean(self) -> bool:
        """Whether the last pass left nothing failing; a standby must be clean to claim."""
        return self.streak == 0

    def finish_pass(self, results: StageResults) -> list[MonitoringDegraded | MonitoringRecovered]:
        """Take in one pass and return the change of state that it brought, if any."""
        was_degraded = self.degraded is not None
        self.passes += 1
        failed = [(stage, error) for stage in Stage if (error := results.get(stage)) is not None]
        self.failures.update(failed)
        for stage, error in results.items():
            if error is None:
                self._failing.pop(stage, None)
            else:
                self._failing[stage] = error
        if failed:
            self.streak += 1
            self._label = failed[0]
        elif not self._failing:
            self.streak = 0
            self._label = None
        return self._change(was_degraded)

    def _change(self, was_degraded: bool) -> list[MonitoringDegraded | MonitoringRecovered]:
        if self.degraded is not None and not was_degraded:
            assert self._label is not None
            return [MonitoringDegraded(*self._label, streak=self.streak)]
        if was_degraded and self.degraded is None:
            return [MonitoringRecovered()]
        return []
