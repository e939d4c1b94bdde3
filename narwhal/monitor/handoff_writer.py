"""Writes the handoff: to the local file by atomic rename, then to the mirror in Redis under the fencing token.

Versions only grow within a term and are never reused, also when a write failed: whoever reads two documents knows which
is newer. Source: source, "Durable control-plane state"; decisions 25 and 26; ha.md, 2.4.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from narwhal.core.control_plane import ControlPlane
from narwhal.core.handoff import HandoffDocument, LeasePart
from narwhal.core.vocabulary import RouterId
from narwhal.ports import Clock, HandoffStore

log = structlog.get_logger()

SOLO_INCARNATION = "solo"


class HandoffWriter:
    """The active's pen. `wall` gives unix seconds for the document's stamp."""

    def __init__(
        self,
        plane: ControlPlane,
        *,
        file: HandoffStore,
        mirror: HandoffStore | None,
        clock: Clock,
        wall: Callable[[], float],
    ) -> None:
        self._plane = plane
        self._file = file
        self._mirror = mirror
        self._clock = clock
        self._wall = wall
        self._one_at_a_time = asyncio.Lock()
        self.written: HandoffDocument | None = None
        self.written_at: float | None = None

    async def write(self) -> None:
        """Write the control plane as it is now, everywhere.

        Does nothing without a lease. Raises StoreUnavailable or HandoffRefused when a place could not be written; the
        other place is written all the same.
        """
        async with self._one_at_a_time:
            if not self._plane.tenure.held(self._clock()):
                return
            document = self._next()
            try:
                await self._file.put(document)
            finally:
                if self._mirror is not None:
                    await self._mirror.put(document)
            self.written = document
            self.written_at = asyncio.get_running_loop().time()
        log.debug("handoff_written", version=document.version, fencing_token=document.lease.token)

    def _next(self) -> HandoffDocument:
        plane = self._plane
        plane.version += 1
        record = plane.tenure.record
        incarnation = record.incarnation if record is not None else SOLO_INCARNATION
        lease = LeasePart(router=RouterId(plane.config.router.id), incarnation=incarnation, token=plane.tenure.token)
        now = asyncio.get_running_loop().time()
        return plane.capture(lease, version=plane.version, now=now, wall=self._wall())
