"""A standby as it watches the lease and the active, for tests of takeover."""

from __future__ import annotations

from typing import Any

from narwhal.core.lease import LeaseObservation, LeaseRecord
from narwhal.core.takeover import (
    Attempt,
    Takeover,
    TakeoverDecision,
    Wait,
)
from narwhal.core.vocabulary import FencingToken, PeerSign
from tests.core.leases import EPOCH, B, held_by, make_ha

T = 2.0
WHOLE_TTL_S = T / (1 - 0.005)
"""The wait for a missing lease: a TTL, stretched by the clock error."""


def attempt(why: str, *, token: int = 7) -> Attempt:
    """The decision to ask for the lease, with the conditions under which it stands."""
    return Attempt(EPOCH, FencingToken(token), why)


class Watch:
    """Router B as it watches; every look takes 10 ms there and back."""

    def __init__(self, *, incarnation: str = "router-b-1", held: int = 0, **ha: Any) -> None:
        self.takeover = Takeover(B, make_ha(**ha), incarnation=incarnation, held=FencingToken(held))
        self.now = 50.0

    def look(self, seen: LeaseObservation, *, after_s: float = 0.1, fit: bool = True) -> TakeoverDecision:
        sent_at = self.now = self.now + after_s
        self.now += 0.01
        return self.takeover.decide(seen, sent_at=sent_at, now=self.now, fit=fit)

    def run_out(self, record: LeaseRecord) -> None:
        """See the lease of `record` through to the last tenth of a second."""
        for left_s, after_s in ((1.6, 0.1), (0.9, 0.69), (0.5, 0.39), (0.3, 0.19), (0.15, 0.14)):
            self.look(held_by(record, left_s=left_s), after_s=after_s)

    def peer(self, sign: PeerSign, *, times: int = 1, token: int | None = 7) -> None:
        for _ in range(times):
            self.takeover.saw_peer(sign, FencingToken(token) if token is not None else None)

    def waits_for_s(self, seen: LeaseObservation) -> float:
        """How long a lease that stays missing is waited for, to 20 ms."""
        started_at = self.now
        while isinstance(self.look(seen, after_s=0.01), Wait):
            assert self.now < started_at + 60, "waits for ever"
        return self.now - started_at
