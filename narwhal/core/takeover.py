"""Takeover: what a standby may conclude from what it sees, and when it may ask for the lease.

Two questions are kept apart. *May I take it?* is answered by the lease alone: it was released, or it ran out as it was
seen to, or it has been missing for a whole TTL on our own clock. A missing key by itself proves nothing (flushed,
evicted, failed over, clock stepped). *Should the active give way?* is answered by its /ready: enough bad signs in a
row make the standby post a claim, which an unfit active honours and a fit one refuses.
Source: source, "Warm standby and lease ownership"; decisions 7, 8 and 37; ha.md, 0.4 and 2.8.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from narwhal.core.lease import LeaseObservation, LeaseRecord
from narwhal.core.vocabulary import FencingToken, PeerSign, RouterId

CLAIM_BACKOFF_S = 5.0
SUCCESSOR_WINDOW_S = 0.25

SIGNS_AGAINST = frozenset({PeerSign.DEGRADED, PeerSign.FENCED, PeerSign.REFUSED, PeerSign.TIMEOUT, PeerSign.UNREADABLE})


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing yet; `reason` says what is waited for."""

    reason: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """Ask for the lease now; `epoch` is the data set that was observed, `why` the proof that nobody holds it."""

    epoch: str | None
    why: str


@dataclass(frozen=True, slots=True)
class PostClaim:
    """Ask the holder of `expected` to give way."""

    expected: LeaseRecord
    reason: str


TakeoverDecision = Wait | Attempt | PostClaim


class Takeover:
    """The standby's memory of the lease and of the active's /ready. Instants are loop seconds."""

    __slots__ = (
        "_claimed_at",
        "_claimed_token",
        "_epoch",
        "_expiry",
        "_last",
        "_misses_needed",
        "_missing_since",
        "_natural",
        "_own_id",
        "_own_ttl_s",
        "misses",
        "signs",
    )

    def __init__(self, own_id: RouterId, *, ttl_s: float, misses: int) -> None:
        self._own_id = own_id
        self._own_ttl_s = ttl_s
        self._misses_needed = misses
        self._last: LeaseRecord | None = None
        self._epoch: str | None = None
        self._expiry = inf
        self._missing_since: float | None = None
        self._natural = False
        self._claimed_at = -inf
        self._claimed_token = FencingToken(0)
        self.misses = 0
        self.signs: dict[PeerSign, int] = dict.fromkeys(PeerSign, 0)

    def saw_peer(self, sign: PeerSign, token: FencingToken | None) -> None:
        """Take in one look at the active's /ready. A good sign, or one of another term, clears the misses."""
        self.signs[sign] += 1
        other_term = self._last is not None and token is not None and token != self._last.token
        if sign in SIGNS_AGAINST and not other_term:
            self.misses += 1
        else:
            self.misses = 0

    def decide(self, seen: LeaseObservation, *, sent_at: float, now: float, fit: bool) -> TakeoverDecision:
        """Return what follows from `seen`, which was asked for at `sent_at` and arrived at `now`.

        `fit` says whether this router could serve: only a fit one claims. Called only with a fresh observation, so an
        unreachable store leads to no decision at all.
        """
        if seen.record is None:
            return self._without_holder(seen, now=now)
        self._saw_holder(seen, seen.record, sent_at=sent_at)
        if seen.record.router == self._own_id:
            return Wait("the lease of this router's former process still runs")
        return self._with_holder(seen.record, now=now, fit=fit)

    def _saw_holder(self, seen: LeaseObservation, record: LeaseRecord, *, sent_at: float) -> None:
        if not record.same_term(self._last):
            self.misses = 0
        self._last = record
        self._epoch = seen.epoch
        self._expiry = sent_at + seen.pttl_ms / 1000
        self._missing_since = None

    def _with_holder(self, record: LeaseRecord, *, now: float, fit: bool) -> TakeoverDecision:
        if self.misses < self._misses_needed:
            return Wait(f"{record.router} is active")
        if not fit:
            return Wait(f"{record.router} looks unfit, but so is this router")
        if record.token == self._claimed_token and now < self._claimed_at + CLAIM_BACKOFF_S:
            return Wait(f"{record.router} was asked to give way")
        self._claimed_token = record.token
        self._claimed_at = now
        return PostClaim(record, f"{self.misses} bad signs in a row")

    def _without_holder(self, seen: LeaseObservation, *, now: float) -> TakeoverDecision:
        if self._missing_since is None:
            self._missing_since = now
            self._natural = self._last is not None and seen.epoch == self._epoch and now >= self._expiry
        released = seen.release
        if released is not None and released.token == seen.token and self._explains(released.token):
            meant_for_other = released.successor not in (None, self._own_id)
            if meant_for_other and now < self._missing_since + SUCCESSOR_WINDOW_S:
                return Wait(f"released to {released.successor}")
            return Attempt(seen.epoch, "released")
        if self._natural:
            return Attempt(seen.epoch, "expired")
        ttl_s = max(self._own_ttl_s, self._last.ttl_ms / 1000 if self._last is not None else 0.0)
        if now >= self._missing_since + ttl_s:
            return Attempt(seen.epoch, f"missing for {ttl_s:g} s")
        return Wait(f"the lease is missing without explanation; waiting {ttl_s:g} s")

    def _explains(self, token: FencingToken) -> bool:
        """Whether a release of `token` accounts for every term that this standby knows of."""
        return self._last is None or token >= self._last.token
