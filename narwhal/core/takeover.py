"""Takeover: what a standby may conclude from what it sees, and when it may ask for the lease.

Two questions are kept apart.

*May I take it?* is answered by the lease alone. A missing key by itself proves nothing: it may have been flushed,
deleted, evicted, lost in a failover, or expired early by a clock that stepped, and its holder may still believe in it.
| what was seen | proof that nobody holds | wait |
|---|---|---|
| a release of the newest term | the holder fenced before it released | none |
| the lease within its last margin, and then gone | the holder's own deadline had passed | none |
| no lease, and no term since the last one of our own | that term is over, and we know it | none |
| no lease, no other data and no new term for a TTL | no renewal can be that long ago | a TTL |
| a lease of a term whose holder says that it is over | a term that was fenced never admits again | none |
| a lease of a term whose process is proven dead | the dead admit nothing | none |

The last two depose: the store compares the lease with exactly the term that is over, and replaces it.

*Should the active give way?* is answered by its /ready: enough bad signs in a row make the standby post a claim, which
an unfit active honours and a fit one refuses.
Source: source, "Warm standby and lease ownership"; decisions 7, 8 and 37; ha.md, 0.4, 2.5 and 2.8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from narwhal.config import HaSection
from narwhal.core.lease import LeaseObservation, LeaseRecord
from narwhal.core.tenure import NO_TOKEN
from narwhal.core.vocabulary import FencingToken, PeerSign, RouterId

CLAIM_BACKOFF_S = 5.0
SUCCESSOR_WINDOW_S = 0.25
GAPS_PER_TTL = 4
"""A wait of one TTL for a missing lease needs at least so many looks, evenly spread."""
ROUNDING_S = 0.002

SIGNS_AGAINST = frozenset({PeerSign.DEGRADED, PeerSign.FENCED, PeerSign.REFUSED, PeerSign.TIMEOUT, PeerSign.UNREADABLE})


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing yet; `reason` says what is waited for."""

    reason: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """Ask for the lease now; `why` is the proof that nobody else holds it.

    It stands only in the data set `epoch`, and only while `after` is the highest token ever granted. `deposing` is a
    lease that stands although its term is over.
    """

    epoch: str | None
    after: FencingToken
    why: str
    deposing: LeaseRecord | None = None


@dataclass(frozen=True, slots=True)
class PostClaim:
    """Ask the holder of `expected` to give way."""

    expected: LeaseRecord
    reason: str


TakeoverDecision = Wait | Attempt | PostClaim


@dataclass(frozen=True, slots=True)
class _Sight:
    """The lease as it was last seen held. `overdue`: within its last margin, so that the holder's deadline is over.

    `expires_at` is the latest end that any look at this term promised: after a step of Redis' clock, a later look may
    promise less than the holder was given.
    """

    record: LeaseRecord
    epoch: str | None
    expires_at: float
    overdue: bool


@dataclass(frozen=True, slots=True)
class _Absence:
    """The lease as it was first seen missing, at `since`, and looked at again without a long gap until `looked_at`.

    Another token or epoch later means that something happened unseen.
    """

    since: float
    looked_at: float
    token: FencingToken
    epoch: str | None
    ran_out: bool


class Takeover:
    """The standby's memory of the lease and of the active's /ready. Instants are loop seconds.

    `incarnation` is this process; `held` the token of its latest term, which is over.
    """

    __slots__ = (
        "_absence",
        "_claimed_at",
        "_claimed_token",
        "_ha",
        "_held",
        "_holder_spoke",
        "_incarnation",
        "_over",
        "_own_id",
        "_sight",
        "misses",
        "signs",
    )

    def __init__(
        self, own_id: RouterId, ha: HaSection, *, incarnation: str = "", held: FencingToken = NO_TOKEN
    ) -> None:
        self._own_id = own_id
        self._ha = ha
        self._incarnation = incarnation
        self._held = held
        self._sight: _Sight | None = None
        self._absence: _Absence | None = None
        self._holder_spoke = False
        self._claimed_at = -inf
        self._claimed_token = NO_TOKEN
        self._over: tuple[FencingToken, str] = (NO_TOKEN, "")
        self.misses = 0
        self.signs: dict[PeerSign, int] = dict.fromkeys(PeerSign, 0)

    def saw_peer(self, sign: PeerSign, token: FencingToken | None) -> None:
        """Take in one look at the active's /ready. A good sign, or one of another term, clears the misses."""
        self.signs[sign] += 1
        if sign is PeerSign.READY and self._absence is not None:
            self._holder_spoke = True
        other_term = self._sight is not None and token is not None and token != self._sight.record.token
        if sign in SIGNS_AGAINST and not other_term:
            self.misses += 1
        else:
            self.misses = 0

    def term_is_over(self, token: FencingToken, why: str) -> None:
        """Take in that the term of `token` never admits again, by its holder's word or a proof of its death."""
        if token > self._over[0]:
            self._over = (token, why)

    def decide(self, seen: LeaseObservation, *, sent_at: float, now: float, fit: bool) -> TakeoverDecision:
        """Return what follows from `seen`, which was asked for at `sent_at` and arrived at `now`.

        `fit` says whether this router could serve: only a fit one claims. Called only with a fresh observation, so an
        unreachable store leads to no decision at all.
        """
        if seen.record is None:
            return self._without_holder(seen, now=now)
        self._saw_holder(seen, seen.record, sent_at=sent_at)
        over, why = self._over
        if seen.record.token == over:
            return Attempt(seen.epoch, seen.token, why, deposing=seen.record)
        if seen.record.router == self._own_id:
            return self._with_own_lease(seen, seen.record)
        return self._with_holder(seen.record, now=now, fit=fit)

    def look_within_s(self, now: float) -> float:
        """Return the longest wait before the next look: a lease that runs out must be seen within its last margin.

        Else its end proves nothing and costs a whole TTL. Within the margin looks come densely, for a short gap.
        """
        if self._sight is None or self._absence is not None:
            return inf
        margin_s = self._ha.margin_s
        return max(self._sight.expires_at - 0.75 * margin_s - now, margin_s / 8)

    def _saw_holder(self, seen: LeaseObservation, record: LeaseRecord, *, sent_at: float) -> None:
        left_s = seen.pttl_ms / 1000
        expires_at = sent_at + left_s
        if self._sight is not None and record.same_term(self._sight.record):
            expires_at = max(expires_at, self._sight.expires_at)
        else:
            self.misses = 0
        overdue = left_s <= self._ha.margin_s
        self._sight = _Sight(record, seen.epoch, expires_at=expires_at, overdue=overdue)
        self._absence = None

    def _with_own_lease(self, seen: LeaseObservation, record: LeaseRecord) -> TakeoverDecision:
        """A term of this process that it never held is a grant that was not heard of; asking again repairs it."""
        if record.incarnation == self._incarnation and record.token > self._held:
            return Attempt(seen.epoch, seen.token, "granted to this process, and the answer was lost")
        return Wait("the lease of this router's former process still runs")

    def _with_holder(self, record: LeaseRecord, *, now: float, fit: bool) -> TakeoverDecision:
        if self.misses < self._ha.takeover_misses:
            return Wait(f"{record.router} is active")
        if not fit:
            return Wait(f"{record.router} looks unfit, but so is this router")
        if record.token == self._claimed_token and now < self._claimed_at + CLAIM_BACKOFF_S:
            return Wait(f"{record.router} was asked to give way")
        self._claimed_token = record.token
        self._claimed_at = now
        return PostClaim(record, f"{self.misses} bad signs in a row")

    def _without_holder(self, seen: LeaseObservation, *, now: float) -> TakeoverDecision:
        absence = self._absence = self._absent(seen, now=now)
        released = seen.release
        if released is not None and released.token == seen.token and self._explains(released.token):
            meant_for_other = released.successor not in (None, self._own_id)
            if meant_for_other and now < absence.since + SUCCESSOR_WINDOW_S:
                return Wait(f"released to {released.successor}")
            return Attempt(seen.epoch, seen.token, "released")
        if absence.ran_out:
            return Attempt(seen.epoch, seen.token, "expired")
        for token, why in ((self._held, "the last term was our own"), self._over):
            if token and seen.token == token and self._explains(token):
                return Attempt(seen.epoch, seen.token, why)
        wait_s = self._whole_ttl_s()
        if now >= absence.since + wait_s:
            return Attempt(seen.epoch, seen.token, f"missing for {wait_s:.3g} s")
        return Wait(f"the lease is missing without explanation; waiting {wait_s:.3g} s")

    def _absent(self, seen: LeaseObservation, *, now: float) -> _Absence:
        """Return the absence that this look continues, or the new one that it begins.

        A whole term may have come and gone with the data in a long gap between two looks, and a router that calls
        itself ready believes in a term that this one cannot see: both begin the wait again.
        """
        absence = self._absence
        spoke, self._holder_spoke = self._holder_spoke, False
        if absence is None or (absence.token, absence.epoch) != (seen.token, seen.epoch):
            return _Absence(now, now, seen.token, seen.epoch, self._ran_out(seen, now=now))
        if spoke or now > absence.looked_at + self._whole_ttl_s() / GAPS_PER_TTL:
            return replace(absence, since=now, looked_at=now)
        return replace(absence, looked_at=now)

    def _ran_out(self, seen: LeaseObservation, *, now: float) -> bool:
        """Whether the lease ended as it was seen to: the same data, no term since, and the holder's deadline over."""
        last = self._sight
        if last is None or (seen.token, seen.epoch) != (last.record.token, last.epoch):
            return False
        # Redis counts whole milliseconds, and its clock and ours do not run alike.
        slack_s = ROUNDING_S + self._ha.clock_error * last.record.ttl_ms / 1000
        return last.overdue and now >= last.expires_at - slack_s

    def _explains(self, token: FencingToken) -> bool:
        """Whether the end of `token` accounts for every term that this standby knows of."""
        return self._sight is None or token >= self._sight.record.token

    def _whole_ttl_s(self) -> float:
        """Return the wait for an unexplained absence: the longest TTL known, even if our own clock runs fast."""
        ttl_s = self._ha.lease_ttl_s
        if self._sight is not None:
            ttl_s = max(ttl_s, self._sight.record.ttl_ms / 1000)
        return ttl_s / (1 - self._ha.clock_error)
