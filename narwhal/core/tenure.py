"""Tenure: what this process may believe about its lease, without asking anyone.

The local deadline counts from the instant *before* the grant or renewal was sent, and ends a margin before the lease
can expire; it is compared on the request path, so no timer is trusted. Instants are seconds of a clock that goes on
while the host is suspended. A term whose deadline passed, or that was fenced, is over: only a new grant, with a higher
token, begins another. Standbys count on that.
Source: source, "Warm standby and lease ownership"; ha.md, 2.5 and 2.6.
"""

from __future__ import annotations

from math import inf

from narwhal.core.lease import LeaseRecord
from narwhal.core.vocabulary import FencingToken

NO_TOKEN = FencingToken(0)


class Tenure:
    """The belief, and the arithmetic behind it."""

    __slots__ = ("_clock_error", "_margin_s", "fenced_reason", "fencings", "record", "token", "valid_until")

    def __init__(self, *, margin_s: float, clock_error: float) -> None:
        self._margin_s = margin_s
        self._clock_error = clock_error
        self.record: LeaseRecord | None = None
        self.token = NO_TOKEN
        self.valid_until = -inf
        self.fenced_reason: str | None = None
        self.fencings = 0

    def granted(self, record: LeaseRecord, *, sent_at: float) -> None:
        """Begin the term of `record`; the request for it left at `sent_at`. Its token exceeds every earlier one."""
        assert record.token > self.token, f"token {record.token} does not exceed {self.token}, the latest one held"
        self.record = record
        self.token = record.token
        self.valid_until = sent_at + self._validity_s(record)
        self.fenced_reason = None

    def renewed(self, *, sent_at: float, now: float) -> None:
        """Extend the term: the store confirmed, by `now`, a renewal that left at `sent_at`.

        Nothing happens without a term, nor to one whose deadline passed before the confirmation came.
        """
        if self.record is not None and self.held(now):
            self.valid_until = max(self.valid_until, sent_at + self._validity_s(self.record))

    def fence(self, reason: str) -> None:
        """End the term at once. The token stays readable, for the last handoff and for the log."""
        self.fencings += self.record is not None
        self.record = None
        self.valid_until = -inf
        self.fenced_reason = reason

    def solo(self) -> None:
        """Begin a term without end, for a router that runs alone without a store."""
        self.token = FencingToken(1)
        self.valid_until = inf

    @property
    def over(self) -> bool:
        """Whether the term of `token` will never admit again: it was fenced, and no later one has begun."""
        return self.token != NO_TOKEN and self.record is None and self.valid_until == -inf

    def held(self, now: float) -> bool:
        """Whether this process may admit at clock time `now`."""
        return now < self.valid_until

    def remaining_s(self, now: float) -> float:
        """Return the seconds left until the local deadline, 0 when it has passed."""
        return max(0.0, self.valid_until - now)

    def _validity_s(self, record: LeaseRecord) -> float:
        return record.ttl_ms / 1000 * (1 - self._clock_error) - self._margin_s
