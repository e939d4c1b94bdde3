"""The highest fencing token that this host has ever seen, on its own disk.

It is the floor under every token to be minted: should Redis lose its data and its clock step back, tokens still rise.
Source: ha.md, 2.3.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import structlog

from narwhal.core.vocabulary import FencingToken
from narwhal.store import atomic_file

log = structlog.get_logger()


class HaRecord:
    """The file `path`: `{"fencing_token":1796022746123}`. One per router; only ever raised."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: FencingToken | None = None

    async def floor(self) -> FencingToken:
        """Return the highest token ever remembered, 0 when none was. Raises StoreUnavailable.

        An unreadable record is kept beside as `<name>.rejected-<n>`, logged, and counts as none.
        """
        if self._known is None:
            self._known = await asyncio.to_thread(self._read)
        return self._known

    async def remember(self, token: FencingToken) -> None:
        """Make sure that `floor` is at least `token`, durably, before this returns. Raises StoreUnavailable."""
        if token <= await self.floor():
            return
        await asyncio.to_thread(self._write, token)
        self._known = token

    def _read(self) -> FencingToken:
        data = atomic_file.read_file(self.path)
        if data is None:
            return FencingToken(0)
        try:
            return FencingToken(int(json.loads(data)["fencing_token"]))
        except (ValueError, KeyError, TypeError) as error:
            kept = atomic_file.set_aside(self.path)
            log.warning("ha_record_rejected", path=str(kept), reason=str(error))
            return FencingToken(0)

    def _write(self, token: FencingToken) -> None:
        atomic_file.make_folder(self.path.parent)
        atomic_file.replace_file(self.path, json.dumps({"fencing_token": token}).encode() + b"\n")
