"""Follows the active's handoff: reads each newer document, applies it to the control plane, keeps it in the local file.

The control plane of a standby is a shadow: at takeover nothing has to be loaded. A document that does not fit the
configured fleet is never applied; the router then says so and does not take over.
Source: source, "Resume validation" and "Warm standby and lease ownership"; decisions 24 and 26.
"""

from __future__ import annotations

import asyncio

import structlog

from narwhal.config import Config
from narwhal.core.control_plane import ControlPlane
from narwhal.core.handoff import HandoffDocument, mismatches
from narwhal.core.vocabulary import FencingToken
from narwhal.errors import HandoffRefused, HandoffRejected, StoreMisused, StoreUnavailable
from narwhal.ports import HandoffStore

log = structlog.get_logger()

Order = tuple[FencingToken, int]


class Follower:
    """What this router has of the newest handoff.

    `applied` is the order of the document in force, `applied_at` when it came (loop seconds).
    """

    def __init__(self, plane: ControlPlane, *, file: HandoffStore, mirror: HandoffStore) -> None:
        self._plane = plane
        self._file = file
        self._mirror = mirror
        self._file_rejected: str | None = None
        self._mirror_rejected: str | None = None
        self._rejected_order: Order | None = None
        self._newest: HandoffDocument | None = None
        self._uncopied = asyncio.Event()
        self.applied: Order | None = None
        self.applied_at: float | None = None

    @property
    def rejected(self) -> str | None:
        """Why a saved handoff that counts cannot be applied, or None. It clears when a fitting newer one is applied."""
        return self._mirror_rejected or self._file_rejected

    async def catch_up(self, newest: Order | None) -> None:
        """Apply the mirrored document, which is `newest`, if it is newer than what is in force.

        Raises StoreUnavailable when the mirror gave no answer, StoreMisused when it refuses. One that cannot be applied
        is reported in `rejected` as long as it is the mirrored one.
        """
        if newest != self._rejected_order:
            self._mirror_rejected = self._rejected_order = None
        if newest is None or newest == self._rejected_order or not self._newer(newest):
            return
        try:
            document = await self._mirror.get()
        except HandoffRejected as error:
            self._mirror_rejected = self._reject(str(error), self._mirror_rejected)
            self._rejected_order = newest
            return
        if document is None or not self._newer(document.order):
            return
        if found := self._misfits(document):
            self._mirror_rejected = self._reject(found, self._mirror_rejected)
            self._rejected_order = newest
            return
        self._apply(document)
        self._newest = document
        self._uncopied.set()

    async def resume_from_file(self) -> None:
        """Apply the local file if it is newer than what is in force; one that cannot be applied is in `rejected`."""
        try:
            document = await self._file.get()
        except (HandoffRejected, StoreUnavailable) as error:
            self._file_rejected = self._reject(f"local file: {error}", self._file_rejected)
            return
        if document is None or not self._newer(document.order):
            return
        if found := self._misfits(document):
            self._file_rejected = self._reject(f"local file: {found}", self._file_rejected)
        else:
            self._apply(document)

    async def token_on_file(self) -> FencingToken:
        """Return the fencing token of the local file, whether it fits or not; 0 when there is none that can be read."""
        try:
            document = await self._file.get()
        except (HandoffRejected, StoreUnavailable):
            return FencingToken(0)
        return document.lease.token if document is not None else FencingToken(0)

    async def keep_copies(self) -> None:
        """Keep the newest applied document in the local file too, until cancelled. A slow disk delays nothing else.

        The copy is what remains when Redis and the active are lost together.
        """
        while True:
            await self._uncopied.wait()
            self._uncopied.clear()
            document = self._newest
            assert document is not None, "only an applied document is marked"
            try:
                await self._file.put(document)
            except HandoffRefused:
                log.debug("handoff_copy_skipped", reason="the local file is newer")
            except (StoreUnavailable, StoreMisused) as error:
                log.warning("handoff_copy_failed", error=str(error))

    def _newer(self, order: Order) -> bool:
        return self.applied is None or order > self.applied

    def _misfits(self, document: HandoffDocument) -> str:
        config: Config = self._plane.config
        return "; ".join(mismatches(document, cluster=config.ha.cluster, engines=config.engines))

    def _apply(self, document: HandoffDocument) -> None:
        now = asyncio.get_running_loop().time()
        self._plane.restore(document, now=now)
        self.applied = document.order
        self.applied_at = now
        self._file_rejected = self._mirror_rejected = self._rejected_order = None

    @staticmethod
    def _reject(reason: str, known: str | None) -> str:
        if reason != known:
            log.error("handoff_rejected", reason=reason)
        return reason
