"""Follows the active's handoff: reads each newer document, keeps it in the local file, applies it to the control plane.

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
from narwhal.errors import HandoffRefused, HandoffRejected, StoreUnavailable
from narwhal.ports import HandoffStore

log = structlog.get_logger()

Order = tuple[FencingToken, int]


class Follower:
    """What this router has of the newest handoff."""

    def __init__(self, plane: ControlPlane, *, file: HandoffStore, mirror: HandoffStore) -> None:
        self._plane = plane
        self._file = file
        self._mirror = mirror
        self.applied: Order | None = None
        self.applied_at: float | None = None
        self.rejected: str | None = None

    async def catch_up(self, newest: Order | None) -> None:
        """Read and apply the mirrored document if it is newer than what was applied.

        Raises StoreUnavailable when the mirror gave no answer. A document that cannot be applied is reported in
        `rejected` until a fitting one appears.
        """
        if newest is None or (self.applied is not None and newest <= self.applied):
            return
        try:
            document = await self._mirror.get()
        except HandoffRejected as error:
            self._reject(str(error))
            return
        if document is not None and self.apply(document):
            await self._keep(document)

    async def resume_from_file(self) -> None:
        """Apply the local file if it is newer than what was applied. An unreadable file is reported in `rejected`."""
        try:
            document = await self._file.get()
        except (HandoffRejected, StoreUnavailable) as error:
            self._reject(f"local file: {error}")
            return
        if document is not None and (self.applied is None or document.order > self.applied):
            self.apply(document)

    def apply(self, document: HandoffDocument) -> bool:
        """Put the control plane where `document` says if it fits; say whether it did."""
        config: Config = self._plane.config
        found = mismatches(document, cluster=config.ha.cluster, engines=config.engines)
        if found:
            self._reject("; ".join(found))
            return False
        now = asyncio.get_running_loop().time()
        self._plane.restore(document, now=now)
        self.applied = document.order
        self.applied_at = now
        self.rejected = None
        return True

    async def _keep(self, document: HandoffDocument) -> None:
        """Keep a copy in the local file: it is what remains when Redis and the active are lost together."""
        try:
            await self._file.put(document)
        except HandoffRefused:
            log.debug("handoff_copy_skipped", reason="the local file is newer")
        except StoreUnavailable as error:
            log.warning("handoff_copy_failed", error=str(error))

    def _reject(self, reason: str) -> None:
        if reason != self.rejected:
            log.error("handoff_rejected", reason=reason)
        self.rejected = reason
