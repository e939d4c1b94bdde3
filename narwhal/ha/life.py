"""A router's life: follow, take over, serve, be fenced, follow again. It ends only when it is told to stop.

Source: source, "Warm standby and lease ownership"; decisions 23, 27, 28, 37.
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
    """Where this host remembers the highest fencing token that it has ever seen, across restarts."""

    async def floor(self) -> FencingToken:
        """Return it, 0 if none is remembered."""
        ...

    async def remember(self, token: FencingToken) -> None:
        """Keep `token` durably if it is higher."""
        ...


class RouterLife:
    """Moves the control plane between standby, active and fenced."""

    def __init__(
        self,
        plane: ControlPlane,
        *,
        standby: Standby,
        keeper: LeaseKeeper,
        tokens: TokenRecord,
        write_handoff: Callable[[], Awaitable[None]],
    ) -> None:
        self._plane = plane
        self._standby = standby
        self._keeper = keeper
        self._tokens = tokens
        self._write_handoff = write_handoff

    async def run(self, candidate: LeaseRecord, options: StandbyOptions) -> None:
        """Live until cancelled."""
        self._standby.floor = await self._tokens.floor()
        while True:
            granted = await self._standby.run(candidate, options)
            if await self._become_active(granted.record, fresh=options.fresh):
                await self._serve(candidate, granted.record)
            options = replace(options, patience_s=0.0, fresh=False)

    async def _serve(self, candidate: LeaseRecord, record: LeaseRecord) -> None:
        """Hold the lease until the term ends, and begin another at once where only the lease's data were lost."""
        while True:
            ended = await self._keeper.hold()
            if ended.claim is not None:
                await self._give_way(record, ended.claim)
            retaken = await self._retake(candidate) if ended.vanished else None
            if retaken is None:
                self._plane.role = RouterRole.FENCED
                self._plane.owner = self._plane.owner_url = None
                log.warning("router_fenced", reason=self._plane.tenure.fenced_reason)
                return
            record = retaken

    async def _retake(self, candidate: LeaseRecord) -> LeaseRecord | None:
        """Ask once for a lease that vanished under us; the script still gives it to one router only."""
        floor = FencingToken(max(self._standby.floor, self._plane.tenure.token))
        try:
            answer = await self._keeper.acquire(candidate, floor=floor, epoch=None)
        except (StoreUnavailable, StoreMisused) as error:
            log.warning("lease_not_retaken", error=str(error))
            return None
        if not isinstance(answer, Granted):
            return None
        await self._tokens.remember(answer.record.token)
        return answer.record

    async def step_down(self) -> None:
        """Stop admitting, write the last handoff, release the lease: the planned end. Safe in any role."""
        record = self._plane.tenure.record
        self._plane.stopping = True
        if record is None:
            return
        await self._flush()
        self._keeper.fence("stopping", planned=True)
        await self._keeper.release(record, successor=None)

    async def _become_active(self, record: LeaseRecord, *, fresh: bool) -> bool:
        """Bring the control plane up to the newest handoff, then open admission."""
        await self._tokens.remember(record.token)
        if not fresh:
            await self._standby.catch_up()
        if self._standby.rejected is not None and not fresh:
            self._keeper.fence("the handoff does not fit the configured fleet")
            await self._keeper.release(record, successor=None)
            return False
        self._plane.counters.add(CounterName.TAKEOVERS)
        self._plane.role = RouterRole.ACTIVE
        self._plane.ineligible = None
        self._plane.owner, self._plane.owner_url = record.router, record.url
        log.info("takeover_finished", fencing_token=record.token, version=self._plane.version)
        return True

    async def _give_way(self, record: LeaseRecord, claim: Claim) -> None:
        await self._flush()
        self._keeper.fence(f"gave way to {claim.router}", planned=True)
        await self._keeper.release(record, successor=RouterId(claim.router))

    async def _flush(self) -> None:
        """Write the last handoff of the term; without an answer the previous one stands."""
        try:
            async with asyncio.timeout(2 * self._plane.config.ha.op_timeout_s):
                await self._write_handoff()
        except (StoreUnavailable, StoreMisused, HandoffRefused, TimeoutError) as error:
            log.warning("last_handoff_not_written", error=str(error) or type(error).__name__)
