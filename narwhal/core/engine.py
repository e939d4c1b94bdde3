"""One engine as the control plane sees it: a record without rules; the rules are in `fleet`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from narwhal.core.evidence import Streaks
from narwhal.core.holds import RULES, Hold
from narwhal.core.vocabulary import (
    EjectionCause,
    EngineId,
    FailureClass,
    HoldKind,
    Leg,
    ProbeKind,
    ReadmissionStep,
    Role,
)

HISTORY_MAX = 10


@dataclass(slots=True)
class Ejection:
    """Why an engine is out, and how far its readmission has come. Instants are loop seconds."""

    cause: EjectionCause
    since: float
    detail: str = ""
    attempts: int = 0
    retry_at: float = 0.0
    running: bool = False
    last_step: ReadmissionStep | None = None
    last_reason: str = ""


@dataclass(slots=True)
class PendingProbe:
    """A probe that is in flight, or due again at `due_at` (loop seconds) after an inconclusive one.

    `number` is that of its latest order. `passed_on` marks a suspicion that another engine's probe raised.
    """

    cause: FailureClass | None
    partner: EngineId | None
    running: bool
    number: int = 0
    due_at: float = inf
    attempts: int = 0
    passed_on: bool = False


@dataclass(frozen=True, slots=True)
class Remark:
    """One line of an engine's history: what was decided, when (loop seconds), and why."""

    at: float
    what: str
    why: str


@dataclass(slots=True)
class Tally:
    """Finished legs within one interval."""

    succeeded: int = 0
    failed: int = 0


@dataclass(slots=True, eq=False)
class Engine:
    """One inference server process behind a URL.

    `blocked_until` is derived: the loop time from which the engine is eligible, infinite while it is not. Placement
    compares only this number, so it must be refreshed after every change of ejection or holds.
    `resident` is the sum of `inflight`; `last_placed` is the number of the newest leg here, counted over the fleet.
    """

    id: EngineId
    url: str
    role: Role
    generation: str | None = None
    ejection: Ejection | None = None
    holds: dict[HoldKind, Hold] = field(default_factory=dict)
    streaks: Streaks = field(default_factory=Streaks)
    probes: dict[ProbeKind, PendingProbe] = field(default_factory=dict)
    inflight: dict[Leg, int] = field(default_factory=lambda: dict.fromkeys(Leg, 0))
    resident: int = 0
    last_placed: int = 0
    blocked_until: float = 0.0
    interval: Tally = field(default_factory=Tally)
    last_interval: Tally = field(default_factory=Tally)
    history: deque[Remark] = field(default_factory=lambda: deque(maxlen=HISTORY_MAX))

    def refresh(self) -> None:
        """Recompute `blocked_until` from ejection and holds."""
        if self.ejection is not None:
            self.blocked_until = inf
        else:
            self.blocked_until = max((hold.until for hold in self.holds.values()), default=0.0)

    def eligible(self, now: float) -> bool:
        """Whether placement may choose this engine at loop time `now`."""
        return self.blocked_until <= now

    @property
    def relievable(self) -> bool:
        """Whether this engine is held, and by nothing but holds that yield to last-engine protection."""
        return (
            self.ejection is None and bool(self.holds) and all(RULES[kind].yields_to_last_engine for kind in self.holds)
        )

    @property
    def drained(self) -> bool:
        """Whether an operator took the engine out."""
        return HoldKind.OPERATOR_DRAIN in self.holds
