"""The handoff in a local file. Source: source, "Atomic handoff writes"; decisions 24 to 26."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from narwhal.core.handoff import HandoffDocument, decode_handoff
from narwhal.errors import HandoffRefused, HandoffRejected
from narwhal.store import atomic_file
from narwhal.store.refusals import refusal

log = structlog.get_logger()


class FileHandoffStore:
    """The HandoffStore of `narwhal.ports` in the file `path`.

    The first write makes the folder and removes what dead writers left there. Everything happens in threads: a slow
    disk never holds the event loop.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cleaned = False

    async def put(self, document: HandoffDocument) -> None:
        """Replace the stored document, durably; writing the same document again is no error.

        Raises HandoffRefused when a newer token or version is stored, StoreUnavailable when the file cannot be written;
        the old document then stays. An unreadable document is kept beside and replaced.
        """
        await asyncio.to_thread(self._put, document)

    async def get(self) -> HandoffDocument | None:
        """Return the stored document or None. Raises HandoffRejected (unreadable) or StoreUnavailable."""
        return await asyncio.to_thread(self._get)

    async def reject(self) -> Path | None:
        """Keep the stored document as `<name>.rejected-<n>` and return that path; None when there is no document.

        Raises StoreUnavailable. Source: decision 24.
        """
        return await asyncio.to_thread(self._reject)

    def _put(self, document: HandoffDocument) -> None:
        atomic_file.make_folder(self.path.parent)
        with atomic_file.exclusive(self.path):
            self._clean()
            self._compare(document)
            atomic_file.replace_file(self.path, document.encode().encode())

    def _clean(self) -> None:
        """Remove what writers left that died, once."""
        if self._cleaned:
            return
        self._cleaned = True
        for stale in atomic_file.remove_stale(self.path):
            log.info("stale_file_removed", path=str(stale))

    def _compare(self, document: HandoffDocument) -> None:
        """Raise HandoffRefused unless `document` follows the stored one or is the same."""
        try:
            stored = self._get()
        except HandoffRejected as error:
            kept = atomic_file.set_aside(self.path)
            log.warning("handoff_rejected", path=str(kept), reasons=error.reasons)
            return
        if stored is None or stored == document or stored.order < document.order:
            return
        if stored.lease.token > document.lease.token:
            raise HandoffRefused(refusal("STALE_TOKEN", document.order, [stored.lease.token]))
        raise HandoffRefused(refusal("VERSION", document.order, [stored.version]))

    def _get(self) -> HandoffDocument | None:
        data = atomic_file.read_file(self.path)
        return None if data is None else decode_handoff(data)

    def _reject(self) -> Path | None:
        return atomic_file.set_aside(self.path) if self.path.exists() else None
