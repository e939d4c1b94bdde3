"""Holds: why an engine takes no new work although it is not ejected, and by what each of them ends.

| kind | placed by | yields to the last-engine rule | ends by | health 200 ends it |
|---|---|---|---|---|
| operator_drain | operator | no | readmission, undrain | no |
| inference_verification | full streak of stream, inference_status, kv_handoff | no | passed probe, ejection | no |
| failure_quarantine | full streak, if `failure_quarantine_s` is set | yes | deadline, health, inference | yes |
| performance_drift | controller | yes | recovery windows | no |

Source: source, "Failure evidence", "Last-engine protection", "Failure quarantine", "Readmission and drains".
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from narwhal.core.vocabulary import EngineId, HoldKind


@dataclass(frozen=True, slots=True)
class HoldRule:
    """One row of the table above."""

    yields_to_last_engine: bool
    health_ends_it: bool
    inference_ends_it: bool


RULES: Final[dict[HoldKind, HoldRule]] = {
    HoldKind.OPERATOR_DRAIN: HoldRule(False, False, False),
    HoldKind.INFERENCE_VERIFICATION: HoldRule(False, False, True),
    HoldKind.FAILURE_QUARANTINE: HoldRule(True, True, True),
    HoldKind.PERFORMANCE_DRIFT: HoldRule(True, False, False),
}

assert RULES.keys() == set(HoldKind), "a new hold needs a row in the table"


@dataclass(slots=True)
class Hold:
    """A standing hold. `since` and `until` are loop seconds; `until` is infinite unless the hold is timed.

    `partner` is the other engine of the recorded pair, `attempts` the inconclusive probes so far (verification only).
    """

    kind: HoldKind
    since: float
    until: float = inf
    reason: str = ""
    actor: str = ""
    partner: EngineId | None = None
    attempts: int = 0
    settled: bool = False
