"""Keeps the lease: takes it, renews it, fences the moment it may be lost, and leaves nothing of an ended term behind.

The deadline counts from before each request left. A renewal that gave no answer is tried again until the deadline; only
the deadline or a definite refusal fences, and a term that is over is never renewed again.
Source: source, "Warm standby and lease ownership"; decision 27; ha.md, 2.5 to 2.7.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from narwhal.config import HaSection
from narwhal.core.claims import Refuse, answer_claim
from narwhal.core.control_plane import ControlPlane
from narwhal.core.lease import AcquireAnswer, Claim, Granted, LeaseRecord, Lost, Occupied, RenewAnswer, Renewed
from narwhal.core.vocabulary import FencingToken, RouterId
from narwhal.errors import StoreMisused, StoreUnavailable
from narwhal.ports import Clock, LeaseStore

log = structlog.get_logger()

PAUSE_S_MIN = 0.02
"""Shortest wait between two renewals: the wait is half of what is left, and would shrink without end."""


@dataclass(frozen=True, slots=True)
class TermEnded:
    """Why a term is over.

    `claim` is set when the holder still holds and must give way. `retake_before` is set when the lease was gone while
    the term was still valid: until then (lease clock) nobody else can have it, since every other router waits a whole
    TTL for a missing lease.
    """

    claim: Claim | None = None
    retake_before: float | None = None


class LeaseKeeper:
    """One router's hand on the lease."""

    def __init__(self, plane: ControlPlane, store: LeaseStore, *, ha: HaSection, clock: Clock) -> None:
        self._plane = plane
        self._store = store
        self._ha = ha
        self._clock = clock
        self._refused: Claim | None = None
        self._asking: LeaseRecord | None = None
        self._standing: LeaseRecord | None = None

    @property
    def held(self) -> bool:
        """Whether the term holds at this instant."""
        return self._plane.tenure.held(self._clock())

    @property
    def remaining_s(self) -> float:
        """Seconds until the local deadline, 0 when it has passed."""
        return self._plane.tenure.remaining_s(self._clock())

    def before(self, instant: float) -> bool:
        """Whether `instant` (lease clock) is still to come."""
        return self._clock() < instant

    async def acquire(
        self,
        candidate: LeaseRecord,
        *,
        floor: FencingToken,
        epoch: str | None,
        after: FencingToken | None = None,
        deposing: LeaseRecord | None = None,
    ) -> AcquireAnswer:
        """Ask for the lease once; a grant begins the local term. Raises StoreUnavailable, StoreMisused.

        A term of ours that is over does not begin again: it then counts as held by another.
        """
        sent_at = self._clock()
        self._asking, self._standing = candidate, None
        answer = await self._store.acquire(candidate, floor=floor, epoch=epoch, after=after, deposing=deposing)
        self._asking = None
        if isinstance(answer, Granted):
            self._standing = answer.record
            if answer.record.token <= self._plane.tenure.token:
                return Occupied(answer.record, answer.record.ttl_ms)
            self._plane.tenure.granted(answer.record, sent_at=sent_at)
            log.info("lease_acquired", fencing_token=answer.record.token, repaired=not answer.fresh)
        return answer

    async def hold(self) -> TermEnded:
        """Renew until the term is over; unless a claim is to be honoured, the tenure is fenced when this returns."""
        tenure = self._plane.tenure
        asked_at, usual_s = self._clock(), self._ha.renew_every_s
        while (record := tenure.record) is not None:
            await asyncio.sleep(self._pause_s(asked_at, usual_s))
            if not self.held:
                break
            asked_at = self._clock()
            answer = await self._renew(record)
            if isinstance(answer, Lost):
                return self._lost(answer)
            if not self.held:
                break
            if answer is not None and answer.claim is not None and self._must_yield(answer.claim):
                return TermEnded(claim=answer.claim)
            usual_s = self._ha.renew_every_s if answer is not None else self._retry_every_s
        self.fence("the local lease deadline has passed")
        return TermEnded()

    def fence(self, reason: str, *, planned: bool = False) -> None:
        """End the term locally, if there is one: nothing is admitted from here on."""
        tenure = self._plane.tenure
        if tenure.record is None:
            return
        tenure.fence(reason)
        write = log.info if planned else log.error
        write("lease_given_up" if planned else "lease_lost", fencing_token=tenure.token, reason=reason)

    async def let_go(self, *, successor: RouterId | None = None) -> None:
        """Release what may stand in the store of a term that is over; without an answer it simply runs out."""
        assert self._plane.tenure.record is None, "fence before letting go: a released term must not admit"
        try:
            standing = self._standing or await self._unheard_of()
            if standing is None:
                return
            released = await self._store.release(standing, successor=successor)
        except (StoreUnavailable, StoreMisused) as error:
            log.warning("lease_release_failed", fencing_token=self._plane.tenure.token, error=str(error))
        else:
            self._standing = None
            log.info("lease_released", fencing_token=standing.token, released=released, successor=successor)

    async def _unheard_of(self) -> LeaseRecord | None:
        """Return a grant to this process that it never heard of: a request was on its way when it was cut short."""
        asking, self._asking = self._asking, None
        if asking is None:
            return None
        record = (await self._store.observe()).record
        return record if record is not None and record.incarnation == asking.incarnation else None

    def _lost(self, answer: Lost) -> TermEnded:
        """The store shows another lease, or none."""
        retake_before = self._plane.tenure.valid_until if self.held and answer.holder is None else None
        holder = answer.holder.router if answer.holder is not None else "nobody"
        self._standing = None
        self.fence(f"the lease is not ours any more; {holder} holds it")
        return TermEnded(retake_before=retake_before)

    async def _renew(self, record: LeaseRecord) -> RenewAnswer | None:
        """Try once, not beyond the deadline; None when nothing is known, and the deadline decides."""
        sent_at = self._clock()
        timeout_s = min(self._ha.op_timeout_s, self.remaining_s)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._store.renew(record)
        except TimeoutError:
            log.warning("lease_renewal_failed", error=f"no answer in {timeout_s:.3g} s")
            return None
        except (StoreUnavailable, StoreMisused) as error:
            log.warning("lease_renewal_failed", error=str(error))
            return None
        if isinstance(answer, Renewed):
            self._plane.tenure.renewed(sent_at=sent_at, now=self._clock())
        return answer

    @property
    def _retry_every_s(self) -> float:
        """Seconds from one failed try to the next: at once after one that got no answer in its time."""
        return min(self._ha.renew_every_s, self._ha.op_timeout_s)

    def _pause_s(self, asked_at: float, usual_s: float) -> float:
        """Return the wait until `usual_s` after the last renewal left, but never past half of the remaining term."""
        remaining_s = self.remaining_s
        due_s = asked_at + usual_s - self._clock()
        return max(min(due_s, remaining_s / 2), min(PAUSE_S_MIN, remaining_s))

    def _must_yield(self, claim: Claim) -> bool:
        verdict = answer_claim(self._plane, claim)
        if isinstance(verdict, Refuse):
            if claim != self._refused:
                self._refused = claim
                log.warning("claim_refused", claimant=claim.router, reason=verdict.reason)
            return False
        log.warning("claim_honoured", claimant=claim.router, reason=claim.reason)
        return True
