"""Counts what the core decides: each kind of decision moves exactly one counter, by one."""

from __future__ import annotations

from typing import Final, NamedTuple, get_args

from prometheus_client import CollectorRegistry

from narwhal.core.events import (
    ConsolidationRiskChanged,
    Decision,
    DrainSettled,
    EngineEjected,
    EngineReadmitted,
    EvidenceCleared,
    HoldLifted,
    HoldPlaced,
    MonitoringDegraded,
    MonitoringRecovered,
    PairParted,
    PairRejoined,
    ProbeJudged,
    ProbeOrdered,
    ReadmissionBlocked,
)
from narwhal.serving.tallies import Tally


class Counted(NamedTuple):
    """The counter of one kind of decision, and the fields of the decision that are its labels."""

    name: str
    text: str
    labels: tuple[str, ...] = ()


COUNTED: Final[dict[type[Decision], Counted]] = {
    EngineEjected: Counted("narwhal_ejections", "Ejected engines", ("engine", "cause")),
    EngineReadmitted: Counted("narwhal_readmissions", "Readmitted engines", ("engine",)),
    HoldPlaced: Counted("narwhal_holds_placed", "Holds placed", ("engine", "kind")),
    HoldLifted: Counted("narwhal_holds_lifted", "Holds lifted", ("engine", "kind")),
    EvidenceCleared: Counted("narwhal_evidence_cleared", "Streaks cleared, by what", ("engine", "reason")),
    ProbeOrdered: Counted("narwhal_probes_ordered", "Ordered probes", ("engine", "kind")),
    ProbeJudged: Counted("narwhal_probes", "Judged probes", ("engine", "kind", "result")),
    PairParted: Counted("narwhal_pairs_parted", "Pairs found unable to work together", ("prefill", "decode")),
    PairRejoined: Counted("narwhal_pairs_rejoined", "Pairs that may work together again", ("prefill", "decode")),
    DrainSettled: Counted("narwhal_drains_settled", "Drained engines without resident work left", ("engine",)),
    ReadmissionBlocked: Counted("narwhal_readmissions_blocked", "Failed readmission attempts", ("engine", "step")),
    ConsolidationRiskChanged: Counted(
        "narwhal_consolidation_risk_changes", "Roles that came to rest on one engine, or no longer do", ("role",)
    ),
    MonitoringDegraded: Counted("narwhal_monitoring_degraded", "Times that monitoring closed admission", ("stage",)),
    MonitoringRecovered: Counted("narwhal_monitoring_recovered", "Times that monitoring opened admission again"),
}
assert COUNTED.keys() == set(get_args(Decision)), "a new decision needs a counter"


class DecisionMetrics:
    """The counters of all kinds of decision, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tallies = {kind: Tally(row.name, row.text, row.labels) for kind, row in COUNTED.items()}
        for tally in self._tallies.values():
            registry.register(tally)

    def decision_made(self, decision: Decision) -> None:
        """Count one decision."""
        kind = type(decision)
        self._tallies[kind].add(*(str(getattr(decision, label)) for label in COUNTED[kind].labels))
