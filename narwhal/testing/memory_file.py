"""A router's disk in memory: the handoff file and the token record, which outlive the process.

They are the twins of `narwhal.store.file_store` and `ha_record`. A disk may be slow, full, or hold a document that
nobody can read.
"""

from __future__ import annotations

import asyncio

from narwhal.core.handoff import HandoffDocument
from narwhal.core.vocabulary import FencingToken
from narwhal.errors import HandoffRefused, HandoffRejected, StoreUnavailable
from narwhal.store.refusals import refusal


class MemoryDisk:
    """What is on it. `full` refuses writes, `delay_s` slows them, `torn` makes the document unreadable."""

    def __init__(self) -> None:
        self.handoff: HandoffDocument | None = None
        self.torn = False
        self.token = FencingToken(0)
        self.full = False
        self.delay_s = 0.0
        self.written = 0

    async def write(self) -> None:
        """Take the time of a write. Raises StoreUnavailable when the disk is full."""
        await asyncio.sleep(self.delay_s)
        if self.full:
            raise StoreUnavailable("disk in memory: no space left on device; free some")
        self.written += 1


class MemoryFile:
    """The HandoffStore of `narwhal.ports` on a `MemoryDisk`; as `FileHandoffStore`."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.disk = disk

    async def put(self, document: HandoffDocument) -> None:
        """Replace the stored document. Raises HandoffRefused, StoreUnavailable."""
        try:
            stored = self._stored()
        except HandoffRejected:
            stored = None
        if stored is not None and stored != document:
            if stored.lease.token > document.lease.token:
                raise HandoffRefused(refusal("STALE_TOKEN", document.order, [stored.lease.token]))
            if stored.order >= document.order:
                raise HandoffRefused(refusal("VERSION", document.order, [stored.version]))
        await self.disk.write()
        self.disk.handoff, self.disk.torn = document, False

    async def get(self) -> HandoffDocument | None:
        """Return the stored document or None. Raises HandoffRejected."""
        return self._stored()

    def _stored(self) -> HandoffDocument | None:
        if self.disk.torn:
            raise HandoffRejected(["(document): Invalid JSON: half a document, as a disk that lies leaves it"])
        return self.disk.handoff


class MemoryTokens:
    """The record of the highest token on a `MemoryDisk`; as `HaRecord`."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.disk = disk

    async def floor(self) -> FencingToken:
        """Return the highest token remembered."""
        return self.disk.token

    async def remember(self, token: FencingToken) -> None:
        """Keep `token` if it is higher. Raises StoreUnavailable."""
        if token > self.disk.token:
            await self.disk.write()
            self.disk.token = max(self.disk.token, token)
