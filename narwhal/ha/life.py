"""A router's life: follow, take over, serve, be fenced, follow again. It ends only when it is told to stop.

Each sequence may be cut short between any two of its steps, by a crash or by `step_down`; what holds then is said where
the step is. Source: source, "Warm standby and lease ownership"; decisions 23, 27, 28, 37.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

import structlog

from narwhal.core.control_plane import ControlPlane
from narwhal.core.counters import CounterName
from narwhal.core.lease import Claim, Granted, LeaseRecord
from narwhal.core.vocabulary import FencingToken, RouterId, RouterRole
from narwhal.errors import HandoffRefused, StoreMisused, StoreUnavailable
from narwhal.ha.keeper import LeaseKeeper
from narwhal.ha.standby import Standby, StandbyOptions

log = structlog.get_logger()


class TokenRecord(Protocol):
    """Where this host remembers the highest fencing token that it was ever granted, across restarts.

    Both methods raise StoreUnavailable.
    """

    async def floor(self) -> FencingToken:
        """Return it, 0 if none is remembered."""
        ...

    async def remember(self, token: FencingToken) -> None:
        """Keep `token` durably if it is higher."""
        ...


class RouterLife:
    """Moves the control plane between standby, active and fenced.

    `took` is told how long each phase of a takeover took, in seconds, once admission is open.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        standby: Standby,
        keeper: LeaseKeeper,
        tokens: TokenRecord,
        write_handoff: Callable[[], Awaitable[None]],
        took: Callable[[str, float], None] = lambda phase, seconds: None,
    ) -> None:
        self._plane = plane
        self._standby = standby
        self._keeper = keeper
        self._tokens = tokens
        self._write_handoff = write_handoff
        self._took = took
        self._living: asyncio.Task[None] | None = None
        self._remembering: asyncio.Task[None] | None = None

    async def run(self, candidate: LeaseRecord, options: StandbyOptions) -> None:
        """Live until cancelled, or until `step_down`, which makes this return."""
        living = self._living = asyncio.create_task(self._live(candidate, options), name="living")
        try:
            await asyncio.wait({living})
        finally:
            await _cancelled(living)
        if not living.cancelled():
            living.result()

    async def step_down(self) -> None:
        """Stop admitting, write the last handoff, release the lease: the planned end. Safe in any role, at any moment.

        A takeover that was under way is given up without a handoff: the shadow may be behind what it would replace.
        """
        self._plane.stopping = True
        if self._living is not None:
            await _cancelled(self._living)
        if self._plane.serving and self._plane.tenure.record is not None:
            await self._flush()
        self._end_term("stopping")
        await self._keeper.let_go()

    async def _live(self, candidate: LeaseRecord, options: StandbyOptions) -> None:
        await self._load_floor()
        while not self._plane.stopping:
            granted = await self._standby.run(candidate, options)
            if await self._become_active(granted.record, fresh=options.fresh):
                await self._serve(candidate)
            options = replace(options, patience_s=0.0, fresh=False)

    async def _become_active(self, record: LeaseRecord, *, fresh: bool) -> bool:
        """Bring the control plane up to the newest handoff, then open admission; else give the lease back.

        Until the last line nothing is admitted and no handoff is written: cut short, the lease just runs out.
        """
        granted_at = asyncio.get_running_loop().time()
        why_not = await self._catch_up(record, fresh=fresh)
        if why_not is None and not self._keeper.held:
            why_not = "the term ran out before it began"
        if why_not is not None:
            self._keeper.fence(why_not)
            await self._keeper.let_go()
            return False
        self._plane.counters.add(CounterName.TAKEOVERS)
        self._plane.role = RouterRole.ACTIVE
        self._plane.ineligible = None
        self._plane.owner, self._plane.owner_url = record.router, record.url
        phases = {**self._standby.phases, "catch_up": asyncio.get_running_loop().time() - granted_at}
        for phase, seconds in phases.items():
            self._took(phase, seconds)
        phases_ms = {phase: round(1000 * seconds, 1) for phase, seconds in phases.items()}
        log.info("takeover_finished", fencing_token=record.token, version=self._plane.version, phases_ms=phases_ms)
        return True

    async def _catch_up(self, record: LeaseRecord, *, fresh: bool) -> str | None:
        """Return why this router must not open admission, or None. Takes at most half of the term."""
        try:
            async with asyncio.timeout(self._keeper.remaining_s / 2):
                await self._remember(record.token)
                if not fresh:
                    await self._standby.catch_up()
        except TimeoutError:
            return "the newest handoff could not be read in time"
        rejected = self._standby.rejected
        return None if fresh or rejected is None else f"the handoff does not fit the configured fleet: {rejected}"

    async def _serve(self, candidate: LeaseRecord) -> None:
        """Hold the lease until the term ends, and begin another at once where only the lease's data were lost."""
        while True:
            ended = await self._keeper.hold()
            if ended.claim is not None:
                await self._give_way(ended.claim)
                return
            if ended.retake_before is None or not await self._retake(candidate, before=ended.retake_before):
                self._end_term("the lease could not be taken again")
                await self._keeper.let_go()
                return

    async def _retake(self, candidate: LeaseRecord, *, before: float) -> bool:
        """Ask once for a lease that vanished under us.

        Until `before` (lease clock) no other router may have been granted it, and the script gives it to one only. An
        answer that comes later proves nothing: the lease may have come to another and vanished again.
        """
        token = self._plane.tenure.token
        try:
            seen = await self._standby.observe()
            if seen.record is not None or seen.token > token:
                return False
            floor = FencingToken(max(self._standby.floor, token))
            answer = await self._keeper.acquire(candidate, floor=floor, epoch=seen.epoch, after=seen.token)
        except (StoreUnavailable, StoreMisused) as error:
            log.warning("lease_not_retaken", error=str(error))
            return False
        if not isinstance(answer, Granted) or not self._keeper.before(before):
            return False
        self._plane.owner, self._plane.owner_url = answer.record.router, answer.record.url
        log.warning("lease_retaken", fencing_token=answer.record.token, lost_token=token)
        await self._remember(answer.record.token)
        return True

    async def _give_way(self, claim: Claim) -> None:
        """Write the last handoff, fence, release to the claimant. Cut short, the lease just runs out."""
        await self._flush()
        self._end_term(f"gave way to {claim.router}")
        await self._keeper.let_go(successor=RouterId(claim.router))

    def _end_term(self, reason: str) -> None:
        """Admit nothing from here on, and say so."""
        self._keeper.fence(reason, planned=True)
        if self._plane.role is RouterRole.ACTIVE:
            self._plane.role = RouterRole.FENCED
            self._plane.owner = self._plane.owner_url = None
            log.warning("router_fenced", reason=self._plane.tenure.fenced_reason)

    async def _flush(self) -> None:
        """Write the last handoff of the term; without an answer the previous one stands."""
        try:
            async with asyncio.timeout(2 * self._plane.config.ha.op_timeout_s):
                await self._write_handoff()
        except (StoreUnavailable, StoreMisused, HandoffRefused, TimeoutError) as error:
            log.warning("last_handoff_not_written", error=str(error) or type(error).__name__)

    async def _load_floor(self) -> None:
        try:
            self._standby.raise_floor(await self._tokens.floor())
        except StoreUnavailable as error:
            log.warning("token_floor_unknown", error=str(error))

    async def _remember(self, token: FencingToken) -> None:
        """Keep `token` on this host, waiting at most a quarter of the term for it.

        A sick disk must not keep the pair from serving: the record is the last resort under a total loss of Redis, and
        the lease does not depend on it.
        """
        writing = self._remembering = asyncio.create_task(self._tokens.remember(token), name="remember-token")
        writing.add_done_callback(_log_failure)
        await asyncio.wait({writing}, timeout=self._keeper.remaining_s / 4)
        if not writing.done():
            log.warning("token_not_remembered", fencing_token=token, error="the disk is slow; still writing")


def _log_failure(writing: asyncio.Task[None]) -> None:
    if not writing.cancelled() and (error := writing.exception()) is not None:
        log.warning("token_not_remembered", error=str(error))


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel `task` and wait until it has ended; what it raised stays in it."""
    task.cancel()
    await asyncio.wait({task})
