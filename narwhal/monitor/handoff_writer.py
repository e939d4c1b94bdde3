"""Writes the handoff: to the local file by atomic rename, and to the mirror in Redis under the fencing token.

Only a router that serves under a lease writes: before that its control plane may be behind what it would replace.
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
from narwhal.errors import HandoffRefused
from narwhal.ports import Clock, HandoffStore

log = structlog.get_logger()

SOLO_INCARNATION = "solo"


class HandoffWriter:
    """The active's pen. `wall` gives unix seconds for the document's stamp.

    `written` is the newest document that is in both places, `written_at` since when (loop seconds).
    """

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
        self._clock = clock
        self._wall = wall
        self._pens = {"file": _Pen(file)} if mirror is None else {"file": _Pen(file), "mirror": _Pen(mirror)}
        self.written: HandoffDocument | None = None
        self.written_at: float | None = None

    @property
    def may_write(self) -> bool:
        """Whether this router decides about the fleet at this instant."""
        return self._plane.serving and self._plane.tenure.held(self._clock())

    async def write(self) -> None:
        """Write the control plane as it is now in both places, at the same time: a sick one does not hold up the other.

        Raises StoreUnavailable, StoreMisused or HandoffRefused when a place could not be written, HandoffRefused also
        when this router does not serve under a lease.
        """
        if not self.may_write:
            raise HandoffRefused("this router does not hold the lease, so it writes no handoff; ask the active router")
        document = self._next()
        results = await asyncio.gather(*(pen.put(document) for pen in self._pens.values()), return_exceptions=True)
        errors = {place: r for place, r in zip(self._pens, results, strict=True) if isinstance(r, BaseException)}
        for place, error in errors.items():
            log.warning("handoff_not_written", place=place, version=document.version, error=str(error))
        for error in errors.values():
            raise error
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


class _Pen:
    """One place, written in the order in which the documents were made."""

    def __init__(self, store: HandoffStore) -> None:
        self._store = store
        self._one_at_a_time = asyncio.Lock()

    async def put(self, document: HandoffDocument) -> None:
        async with self._one_at_a_time:
            await self._store.put(document)
