"""The canonical record of one request: written once, as one log line and a few metrics, when the request has ended."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from narwhal.core.control_plane import ControlPlane
from narwhal.core.counters import CounterName
from narwhal.core.vocabulary import EngineId, FencingToken
from narwhal.ports import Usage
from narwhal.serving.metrics import Metrics, RequestFigures
from narwhal.serving.outcomes import UNSUCCESSFUL, Outcome

log = structlog.get_logger()


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request so far. Instants are loop seconds, `admitted_at` is of the lease clock."""

    request_id: str
    path: str
    began_at: float
    model: str | None = None
    stream: bool = False
    whole: str | None = None
    token: FencingToken | None = None
    admitted_at: float | None = None
    prefill: EngineId | None = None
    decode: EngineId | None = None
    attempts: int = 0
    status: int = 500
    outcome: Outcome = Outcome.CRASHED
    error: str | None = None
    first_token_at: float | None = None
    frames: int = 0
    usage: Usage | None = None

    def ended(self, status: int, outcome: Outcome, error: str | None = None) -> None:
        """Note how the request ended."""
        self.status = status
        self.outcome = outcome
        self.error = error

    def write(self, plane: ControlPlane, metrics: Metrics, *, now: float) -> None:
        """Log and count the request, which ended at loop time `now`."""
        duration_s = now - self.began_at
        ttft_s = None if self.first_token_at is None else self.first_token_at - self.began_at
        chunk_s = None
        if self.first_token_at is not None and self.frames > 1:
            chunk_s = (now - self.first_token_at) / (self.frames - 1)
        metrics.request_finished(RequestFigures(self.path, self.outcome, duration_s, ttft_s, chunk_s))
        if self.admitted_at is not None:
            if self.outcome is Outcome.SERVED:
                plane.counters.add(CounterName.REQUESTS_SERVED)
            elif self.outcome in UNSUCCESSFUL:
                plane.counters.add(CounterName.REQUESTS_FAILED)
        facts = {
            "request_id": self.request_id,
            "path": self.path,
            "model": self.model,
            "stream": self.stream,
            "prefill": self.prefill,
            "decode": self.decode,
            "attempts": self.attempts,
            "status": self.status,
            "outcome": self.outcome,
            "ttft_s": None if ttft_s is None else round(ttft_s, 6),
            "duration_s": round(duration_s, 6),
            "prompt_tokens": None if self.usage is None else self.usage.prompt_tokens,
            "completion_tokens": None if self.usage is None else self.usage.completion_tokens,
            "fencing_token": self.token,
            "admitted_at": self.admitted_at,
        }
        if self.error is not None:
            facts["error"] = self.error
        if self.whole is not None:
            facts["whole"] = self.whole
        log.info("request_finished", **facts)
