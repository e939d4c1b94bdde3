"""The closed word lists. A member's value is the word on the wire, in logs, in metrics and in handoffs."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

EngineId = NewType("EngineId", str)
RouterId = NewType("RouterId", str)
FencingToken = NewType("FencingToken", int)


class Role(StrEnum):
    """What placement may ask of an engine."""

    PREFILL = "prefill"
    DECODE = "decode"


class Leg(StrEnum):
    """One HTTP call of a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class FailureClass(StrEnum):
    """The source's six classes of failure evidence, and liveness with its own counter."""

    CONNECTION = "connection"
    TIMEOUT = "timeout"
    STREAM = "stream"
    OVERLOAD = "overload"
    INFERENCE_STATUS = "inference_status"
    KV_HANDOFF = "kv_handoff"
    LIVENESS = "liveness"


class Success(StrEnum):
    """The source's four kinds of successful response, each clearing some failure evidence."""

    CLIENT_ERROR = "client_error"
    HEALTH = "health"
    PREFILL = "prefill"
    DECODE = "decode"


class Action(StrEnum):
    """What a full streak leads to."""

    EJECT = "eject"
    PROBE_HEALTH = "probe_health"
    VERIFY_INFERENCE = "verify_inference"


class HoldKind(StrEnum):
    """Why an engine takes no new work although it is not ejected."""

    OPERATOR_DRAIN = "operator_drain"
    INFERENCE_VERIFICATION = "inference_verification"
    FAILURE_QUARANTINE = "failure_quarantine"
    PERFORMANCE_DRIFT = "performance_drift"


class EjectionCause(StrEnum):
    """What took an engine out of placement."""

    CONNECTION = "connection"
    LIVENESS = "liveness"
    HEALTH_PROBE = "health_probe"
    INFERENCE_PROBE = "inference_probe"
    GENERATION_CHANGED = "generation_changed"
    OPERATOR = "operator"


class ProbeKind(StrEnum):
    """A test that the router starts."""

    HEALTH = "health"
    INFERENCE = "inference"


class ProbeResult(StrEnum):
    """How a probe ended; never a bool."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"


class ReadmissionStep(StrEnum):
    """The checks before an engine returns to placement, in the source's order."""

    HEALTH = "health"
    ATTESTATION = "attestation"
    MODEL_IDENTITY = "model_identity"
    GENERATION_IDENTITY = "generation_identity"
    KV_TRANSFER = "kv_transfer"
    FINAL_HEALTH = "final_health"


class Stage(StrEnum):
    """The stages of a monitor pass, in the source's order."""

    CONTROLLER = "controller"
    HEALTH = "health"
    DRAINS = "drains"
    ROLLOVER = "rollover"
    READMISSION = "readmission"
    LIVENESS = "liveness"
    TELEMETRY = "telemetry"
    HANDOFF = "handoff"


class RouterRole(StrEnum):
    """What a router is to the pair right now."""

    ACTIVE = "active"
    STANDBY = "standby"
    FENCED = "fenced"
    SOLO = "solo"


class PeerSign(StrEnum):
    """What a standby learnt from one look at the active's /ready."""

    READY = "ready"
    DEGRADED = "degraded"
    NO_CAPACITY = "no_capacity"
    FENCED = "fenced"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNREADABLE = "unreadable"
