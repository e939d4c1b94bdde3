"""Keeps the lease: takes it, renews it, and fences the moment it may be lost.

The deadline counts from before each request left. A renewal that gave no answer is tried again until the deadline; only
the deadline or a definite refusal fences, and a fenced term is never renewed again.
Source: source, "Warm standby and lease ownership"; decision 27; ha.md, 2.5 to 2.7.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from narwhal.config import HaSection
from narwhal.core.claims import Refuse, answer_claim
from narwhal.core.control_plane import ControlPlane
from narwhal.core.lease import AcquireAnswer, Claim, Granted, LeaseRecord, Lost, RenewAnswer, Renewed
from narwhal.core.vocabulary import FencingToken, RouterId
from narwhal.errors import StoreMisused, StoreUnavailable
from narwhal.ports import Clock, LeaseStore

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TermEnded:
    """Why a term is over.

    `claim` is set when the holder still holds and must give way. `vanished` says that the lease was gone while the
    term was still valid: nobody else can have it yet, since every other router waits a whole TTL for a missing lease.
    """

    claim: Claim | None = None
    vanished: bool = False


class LeaseKeeper:
    """One router's hand on the lease."""

    def __init__(self, plane: ControlPlane, store: LeaseStore, *, ha: HaSection, clock: Clock) -> None:
        self._plane = plane
        self._store = store
        self._ha = ha
        self._clock = clock
        self._refused: Claim | None = None

    async def acquire(self, candidate: LeaseRecord, *, floor: FencingToken, epoch: str | None) -> AcquireAnswer:
        """Ask for the lease once; a grant begins the local term. Raises StoreUnavailable, StoreMisused."""
        sent_at = self._clock()
        answer = await self._store.acquire(candidate, floor=floor, epoch=epoch)
        if isinstance(answer, Granted):
            self._plane.tenure.granted(answer.record, sent_at=sent_at)
            log.info("lease_acquired", fencing_token=answer.record.token, repaired=not answer.fresh)
        return answer

    async def hold(self) -> TermEnded:
        """Renew until the term is over; unless a claim is to be honoured, the tenure is fenced when this returns."""
        tenure = self._plane.tenure
        record = tenure.record
        assert record is not None, "hold without a term"
        while True:
            await asyncio.sleep(self._pause_s())
            if not tenure.held(self._clock()):
                return self._over()
            answer = await self._renew(record)
            held = tenure.held(self._clock())
            if isinstance(answer, Lost):
                holder = answer.holder.router if answer.holder is not None else "nobody"
                self.fence(f"the lease is not ours any more; {holder} holds it")
                return TermEnded(vanished=held and answer.holder is None)
            if not held:
                return self._over()
            if answer is not None and answer.claim is not None and self._must_yield(answer.claim):
                return TermEnded(claim=answer.claim)

    def _over(self) -> TermEnded:
        """End a term whose deadline has passed, or that was fenced meanwhile: it must not be renewed again."""
        if self._plane.tenure.record is not None:
            self.fence("the local lease deadline has passed")
        return TermEnded()

    def fence(self, reason: str, *, planned: bool = False) -> None:
        """End the term locally: nothing is admitted from here on."""
        self._plane.tenure.fence(reason)
        write = log.info if planned else log.error
        write("lease_given_up" if planned else "lease_lost", fencing_token=self._plane.tenure.token, reason=reason)

    async def release(self, record: LeaseRecord, *, successor: RouterId | None) -> None:
        """Give the lease up in the store; without an answer it simply runs out."""
        try:
            released = await self._store.release(record, successor=successor)
        except (StoreUnavailable, StoreMisused) as error:
            log.warning("lease_release_failed", fencing_token=record.token, error=str(error))
        else:
            log.info("lease_released", fencing_token=record.token, released=released, successor=successor)

    async def _renew(self, record: LeaseRecord) -> RenewAnswer | None:
        """Try once; None when nothing is known, and the deadline decides."""
        sent_at = self._clock()
        try:
            async with asyncio.timeout(self._ha.op_timeout_s):
                answer = await self._store.renew(record)
        except TimeoutError:
            log.warning("lease_renewal_failed", error=f"no answer in {self._ha.op_timeout_s:g} s")
            return None
        except (StoreUnavailable, StoreMisused) as error:
            log.warning("lease_renewal_failed", error=str(error))
            return None
        if isinstance(answer, Renewed):
            self._plane.tenure.renewed(sent_at=sent_at, now=self._clock())
        return answer

    def _pause_s(self) -> float:
        """Return the wait before the next renewal: never past half of what is left of the term."""
        remaining_s = self._plane.tenure.remaining_s(self._clock())
        return max(0.0, min(self._ha.renew_every_s, remaining_s / 2))

    def _must_yield(self, claim: Claim) -> bool:
        verdict = answer_claim(self._plane, claim)
        if isinstance(verdict, Refuse):
            if claim != self._refused:
                self._refused = claim
                log.warning("claim_refused", claimant=claim.router, reason=verdict.reason)
            return False
        log.warning("claim_honoured", claimant=claim.router, reason=claim.reason)
        return True
