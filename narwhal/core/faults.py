"""What an engine did wrong, as exceptions that already carry their failure class.

Drivers translate library exceptions into these at the call site; nobody above a driver catches `aiohttp.*`.
A fault without a class (`failure_class is None`) is never evidence against an engine.
"""

from __future__ import annotations

from typing import ClassVar

from narwhal.core.vocabulary import FailureClass
from narwhal.errors import NarwhalError


class EngineFault(NarwhalError):
    """One leg did not do what was asked of it."""

    failure_class: ClassVar[FailureClass | None] = None


class EngineUnreachable(EngineFault):
    """The connection was refused, reset or lost before the engine accepted the request."""

    failure_class = FailureClass.CONNECTION


class EngineTimeout(EngineFault):
    """The transport gave no answer in time: connecting, or waiting for response headers of a prefill."""

    failure_class = FailureClass.TIMEOUT


class StreamBroken(EngineFault):
    """No first token in time, silence between tokens, an error frame, or an end without finish reason and marker."""

    failure_class = FailureClass.STREAM


class EngineOverloaded(EngineFault):
    """The engine answered 408 or 429, or a 503 that says it is only busy."""

    failure_class = FailureClass.OVERLOAD

    def __init__(self, message: str, *, status: int, retry_after_s: float | None = None) -> None:
        self.status = status
        self.retry_after_s = retry_after_s
        super().__init__(message)


class EngineFailedStatus(EngineFault):
    """The engine answered another 5xx, or 200 with an error document instead of a result."""

    failure_class = FailureClass.INFERENCE_STATUS

    def __init__(self, message: str, *, status: int) -> None:
        self.status = status
        super().__init__(message)


class EnginePaused(EngineFailedStatus):
    """The engine answered a 503 that says it is paused or asleep: well, but it takes no work until it is resumed."""


class KvTicketUnreadable(EngineFault):
    """The prefill answered 200 without a ticket that a decode engine could safely be given."""

    failure_class = FailureClass.KV_HANDOFF


class PoolFull(EngineFault):
    """Our own pool, or our host, has no room for another connection: saturation, not evidence."""


class DeadlinePassed(EngineFault):
    """The request's own deadline ran out: the client's or our limit, not evidence."""
