"""Everything that can happen to the fleet (`FleetEvent`), and everything the core may decide (`Decision`).

Drivers build events and carry decisions out. Both are frozen values; instants are loop seconds passed beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from narwhal.core.vocabulary import (
    EjectionCause,
    EngineId,
    FailureClass,
    HoldKind,
    Leg,
    ProbeKind,
    ProbeResult,
    ReadmissionStep,
    Role,
    Stage,
)


@dataclass(frozen=True, slots=True)
class LegStarted:
    """A leg was sent to `engine`: one more in flight."""

    engine: EngineId
    leg: Leg


@dataclass(frozen=True, slots=True)
class LegReleased:
    """A leg ended, however it ended: one fewer in flight. Sent exactly once for each `LegStarted`."""

    engine: EngineId
    leg: Leg


@dataclass(frozen=True, slots=True)
class LegSucceeded:
    """A prefill yielded a readable ticket, or a decode stream reached its terminal marker after a finish reason.

    `partner` is the prefill engine whose ticket the decode used, if it used one.
    """

    engine: EngineId
    leg: Leg
    partner: EngineId | None = None


@dataclass(frozen=True, slots=True)
class LegRefused:
    """The engine answered 4xx other than 408 and 429: the client's mistake, and proof that the engine answers."""

    engine: EngineId
    leg: Leg


@dataclass(frozen=True, slots=True)
class LegFailed:
    """A leg failed with evidence of `failure_class`; `partner` is the other engine of the pair, if one was chosen."""

    engine: EngineId
    leg: Leg
    failure_class: FailureClass
    partner: EngineId | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class HealthAnswered:
    """`/health` said 200, whoever asked."""

    engine: EngineId


@dataclass(frozen=True, slots=True)
class LivenessSilent:
    """A liveness sweep got no successful health response from `engine`."""

    engine: EngineId
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PairFinding:
    """One try of an inference probe over (`prefill`, `decode`): which leg failed, if one did.

    `conclusive` is False when our own pool was full or our own loop was late: then nothing follows from it.
    """

    prefill: EngineId
    decode: EngineId
    failed_leg: Leg | None = None
    conclusive: bool = True
    detail: str = ""


@dataclass(frozen=True, slots=True)
class HealthProbed:
    """A health probe of a suspect engine ended.

    `number` is that of the order: a verdict that another order has overtaken counts for nothing. None answers whichever
    probe is open.
    """

    engine: EngineId
    result: ProbeResult
    detail: str = ""
    number: int | None = None


@dataclass(frozen=True, slots=True)
class InferenceProbed:
    """An inference probe of a suspect engine ended; the recorded pair comes first in `findings`.

    `number` as in `HealthProbed`.
    """

    engine: EngineId
    findings: tuple[PairFinding, ...]
    number: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationSeen:
    """The engine's process identity was read; `generation` is opaque and compared for equality only."""

    engine: EngineId
    generation: str


@dataclass(frozen=True, slots=True)
class DrainOrdered:
    """An operator takes `engine` out of placement; resident work goes on."""

    engine: EngineId
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class DrainCancelled:
    """An operator puts a drained engine back without readmission (`undrain`)."""

    engine: EngineId
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class EjectionOrdered:
    """An operator ejects `engine`; it returns by readmission."""

    engine: EngineId
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReadmissionFailed:
    """A readmission attempt stopped at `step`; it is retried with back-off."""

    engine: EngineId
    step: ReadmissionStep
    reason: str


@dataclass(frozen=True, slots=True)
class ReadmissionPassed:
    """Every readmission check passed; `generation` is the identity that was proven."""

    engine: EngineId
    generation: str | None
    clears_drain: bool = False


FleetEvent = (
    LegStarted
    | LegReleased
    | LegSucceeded
    | LegRefused
    | LegFailed
    | HealthAnswered
    | LivenessSilent
    | HealthProbed
    | InferenceProbed
    | GenerationSeen
    | DrainOrdered
    | DrainCancelled
    | EjectionOrdered
    | ReadmissionFailed
    | ReadmissionPassed
)


@dataclass(frozen=True, slots=True)
class EngineEjected:
    """`engine` left placement until readmission."""

    engine: EngineId
    cause: EjectionCause
    streak: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineReadmitted:
    """`engine` returned to placement; every failure streak starts from zero."""

    engine: EngineId
    generation: str | None


@dataclass(frozen=True, slots=True)
class HoldPlaced:
    """`engine` takes no new work for the reason `kind`."""

    engine: EngineId
    kind: HoldKind
    reason: str


@dataclass(frozen=True, slots=True)
class HoldLifted:
    """One hold of `engine` ended; `reason` says by what."""

    engine: EngineId
    kind: HoldKind
    reason: str


@dataclass(frozen=True, slots=True)
class EvidenceCleared:
    """Non-zero streaks of `classes` went to zero."""

    engine: EngineId
    classes: tuple[FailureClass, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeOrdered:
    """Start a probe of `engine` on the control pool now; for an inference probe, try `partner` first.

    `number` tells this order from every other; the report of the probe carries it.
    """

    engine: EngineId
    kind: ProbeKind
    partner: EngineId | None
    cause: FailureClass | None
    number: int = 0


@dataclass(frozen=True, slots=True)
class ProbeJudged:
    """A probe's verdict; `next_at` is the loop time of the next one if it was inconclusive."""

    engine: EngineId
    kind: ProbeKind
    result: ProbeResult
    detail: str = ""
    next_at: float | None = None


@dataclass(frozen=True, slots=True)
class PairParted:
    """Two engines that work with others fail together: placement keeps them apart until a probe due at `next_at`."""

    prefill: EngineId
    decode: EngineId
    detail: str
    next_at: float


@dataclass(frozen=True, slots=True)
class PairRejoined:
    """Placement may use the pair again."""

    prefill: EngineId
    decode: EngineId
    reason: str


@dataclass(frozen=True, slots=True)
class DrainSettled:
    """A drained engine has no resident work left."""

    engine: EngineId


@dataclass(frozen=True, slots=True)
class ReadmissionBlocked:
    """A readmission attempt stopped at `step`; the next one is due at loop time `retry_at`."""

    engine: EngineId
    step: ReadmissionStep
    reason: str
    retry_at: float


@dataclass(frozen=True, slots=True)
class ConsolidationRiskChanged:
    """The work of `role` now rests on at most one eligible engine (`at_risk`), or no longer does."""

    role: Role
    at_risk: bool


@dataclass(frozen=True, slots=True)
class MonitoringDegraded:
    """The monitor failed `streak` passes in a row: admission closes."""

    stage: Stage
    error_class: str
    streak: int


@dataclass(frozen=True, slots=True)
class MonitoringRecovered:
    """One fully successful pass: admission opens again."""


Decision = (
    EngineEjected
    | EngineReadmitted
    | HoldPlaced
    | HoldLifted
    | EvidenceCleared
    | ProbeOrdered
    | ProbeJudged
    | PairParted
    | PairRejoined
    | DrainSettled
    | ReadmissionBlocked
    | ConsolidationRiskChanged
    | MonitoringDegraded
    | MonitoringRecovered
)
