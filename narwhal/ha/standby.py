"""The standby's duty: follow the handoff, watch the active, and ask for the lease when the core says so.

The lease is the truth; the event stream is only a wake-up, and the active's /ready only a reason to claim.
Source: source, "Warm standby and lease ownership"; decisions 7, 8, 29, 32; ha.md, 2.4 and 2.8.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from narwhal.config import HaSection
from narwhal.core.control_plane import ControlPlane
from narwhal.core.lease import Claim, DataLost, Granted, LeaseObservation, LeaseRecord, Occupied
from narwhal.core.takeover import Attempt, PostClaim, Takeover, Wait
from narwhal.core.vocabulary import FencingToken, RouterId, RouterRole
from narwhal.errors import StoreMisused, StoreUnavailable
from narwhal.ha.follower import Follower
from narwhal.ha.keeper import LeaseKeeper
from narwhal.ha.lookout import Lookout
from narwhal.ports import LeaseStore

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StandbyOptions:
    """How eager this standby is: a patient one lets others take a lease that it never saw held, for `patience_s`."""

    patience_s: float = 0.0
    fresh: bool = False


class Standby:
    """Follows until the lease is granted. `phases` says how long the parts of that took, in seconds.

    `notice` is the time since the active was last seen ready, `grant` that of the request for the lease.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        store: LeaseStore,
        keeper: LeaseKeeper,
        follower: Follower,
        lookout: Lookout,
        could_serve: Callable[[], str | None],
    ) -> None:
        self._plane = plane
        self._store = store
        self._keeper = keeper
        self._follower = follower
        self._lookout = lookout
        self._could_serve = could_serve
        self._ha: HaSection = plane.config.ha
        self._own_id = RouterId(plane.config.router.id)
        self._said: str | None = None
        self.takeover = Takeover(self._own_id, self._ha)
        self.floor = FencingToken(0)
        self.phases: dict[str, float] = {}

    async def run(self, candidate: LeaseRecord, options: StandbyOptions) -> Granted:
        """Follow and watch until this router holds the lease; return the grant."""
        self.takeover = Takeover(
            self._own_id, self._ha, incarnation=candidate.incarnation, held=self._plane.tenure.token
        )
        self.raise_floor(await self._follower.token_on_file())
        not_before = asyncio.get_running_loop().time() + options.patience_s
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(self._lookout.watch_peer(self.takeover), name="watch-peer"),
                group.create_task(
                    self._lookout.watch_life(self.takeover, own_incarnation=candidate.incarnation), name="watch-life"
                ),
                group.create_task(self._follower.keep_copies(), name="keep-copies"),
            ]
            granted = await self._follow(candidate, options, not_before=not_before)
            for task in beside:
                task.cancel()
        return granted

    async def _follow(self, candidate: LeaseRecord, options: StandbyOptions, *, not_before: float) -> Granted:
        while True:
            try:
                granted = await self._look(candidate, options, not_before=not_before)
                if granted is not None:
                    return granted
                look_within_s = self.takeover.look_within_s(asyncio.get_running_loop().time())
                await self._wait(min(self._ha.poll_every_s, look_within_s))
            except StoreUnavailable as error:
                self._say(f"redis does not answer: {error}")
                await asyncio.sleep(self._ha.poll_every_s)
            except StoreMisused as error:
                self._say(f"redis refuses: {error}")
                await asyncio.sleep(5.0)

    async def _wait(self, timeout_s: float) -> None:
        """Return after `timeout_s`, when something was written, or when there is news of the holder."""
        works = {
            asyncio.create_task(self._store.wait_for_event(timeout_s=timeout_s), name="wait-event"),
            asyncio.create_task(self._lookout.news.wait(), name="wait-news"),
        }
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for work in works:
                work.cancel()
            await asyncio.wait(works)
        self._lookout.news.clear()

    async def _look(self, candidate: LeaseRecord, options: StandbyOptions, *, not_before: float) -> Granted | None:
        """Observe once, follow what is new, and do what the core decides."""
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        seen = await self.observe()
        if not options.fresh:
            await self._follower.catch_up(seen.handoff)
        why_not = self._why_not()
        decision = self.takeover.decide(seen, sent_at=sent_at, now=loop.time(), fit=why_not is None)
        match decision:
            case Wait():
                self._say(why_not, waiting_for=decision.reason)
            case PostClaim():
                await self._claim(candidate, decision)
            case Attempt() if self.rejected is not None:
                self._say(why_not)
            case Attempt() if self._lookout.holder is None and loop.time() < not_before:
                self._say(why_not, waiting_for="another router to become active first")
            case Attempt():
                return await self._attempt(candidate, decision)
        return None

    def _why_not(self) -> str | None:
        """Return why this router could not serve if it took over now, or None if it could."""
        if self.rejected is not None:
            return f"handoff does not fit: {self.rejected}"
        if not self._plane.monitoring.clean:
            return "its own monitoring fails"
        return self._could_serve()

    async def catch_up(self) -> None:
        """Apply the newest mirrored handoff; return only when that is done, so bound it.

        The last one may have come between the last look and the grant. Going on without it could lose a drain.
        """
        while True:
            try:
                seen = await self.observe()
                await self._follower.catch_up(seen.handoff)
            except (StoreUnavailable, StoreMisused) as error:
                log.warning("takeover_delayed", error=str(error), handoff=self._follower.applied)
                await asyncio.sleep(self._ha.poll_every_s)
            else:
                return

    @property
    def rejected(self) -> str | None:
        """Why the newest handoff cannot be applied, or None."""
        return self._follower.rejected

    def raise_floor(self, token: FencingToken) -> None:
        """Ask for no token up to `token` from now on."""
        self.floor = FencingToken(max(self.floor, token))

    async def observe(self) -> LeaseObservation:
        """Look at the store once. A fenced router that can see it follows again."""
        seen = await self._store.observe()
        self._note(seen)
        if self._plane.role is RouterRole.FENCED:
            self._plane.role = RouterRole.STANDBY
        return seen

    def _note(self, seen: LeaseObservation) -> None:
        """Keep what any answer teaches: who holds, and the highest token ever seen."""
        self.raise_floor(seen.token)
        if seen.handoff is not None:
            self.raise_floor(seen.handoff[0])
        if seen.record is not None:
            self._lookout.saw_holder(seen.record)
            self.raise_floor(seen.record.token)
        self._plane.owner = seen.record.router if seen.record is not None else None
        self._plane.owner_url = seen.record.url if seen.record is not None else None

    async def _attempt(self, candidate: LeaseRecord, attempt: Attempt) -> Granted | None:
        began, ready_at = asyncio.get_running_loop().time(), self._lookout.ready_at
        answer = await self._keeper.acquire(
            candidate, floor=self.floor, epoch=attempt.epoch, after=attempt.after, deposing=attempt.deposing
        )
        match answer:
            case Granted():
                self.phases = {} if ready_at is None else {"notice": began - ready_at}
                self.phases["grant"] = asyncio.get_running_loop().time() - began
                log.info("takeover_started", why=attempt.why, fencing_token=answer.record.token)
                return answer
            case Occupied():
                log.info("lease_taken_by_another", holder=answer.record.router, fencing_token=answer.record.token)
            case DataLost():
                log.warning("attempt_overtaken", why=attempt.why, consequence="looking again before the next attempt")
        return None

    async def _claim(self, candidate: LeaseRecord, claim: PostClaim) -> None:
        wish = Claim(self._own_id, candidate.incarnation, claim.expected.token, claim.reason)
        posted = await self._store.claim(claim.expected, wish)
        log.warning("claim_posted", against=claim.expected.router, reason=claim.reason, posted=posted)

    def _say(self, why_not: str | None, *, waiting_for: str | None = None) -> None:
        """Show in /ready why this router could not take over; log it, and what it waits for, when that changes."""
        self._plane.ineligible = why_not
        said = f"{why_not}; {waiting_for}"
        if said != self._said:
            self._said = said
            log.info("standby_waiting", ineligible=why_not, waiting_for=waiting_for)
