"""Waiting for the next event of the stream: a wake-up, never a truth.

XREAD blocks from the last id seen, so nothing between two waits is missed. The stream may be absent, trimmed, emptied
or start anew with lower ids (data loss, a clock that stepped back): each wait first compares the stream's last id with
the last one seen, and a difference is itself an event. Source: ha.md, 2.4.
"""

from __future__ import annotations

import asyncio
from typing import Final

from narwhal.errors import StoreMisused, StoreUnavailable
from narwhal.store.connection import RedisLink
from narwhal.store.replies import items, text

BLOCK_S_MAX: Final = 1.0
"""Longest single XREAD; the tail's connection must allow a read to last a second more."""

PAUSE_S: Final = 0.1
"""Time between two attempts while Redis does not answer."""

BEGINNING: Final = "0-0"


class EventTail:
    """The place up to which this router has heard of events."""

    def __init__(self, link: RedisLink, events: str) -> None:
        self._link = link
        self._events = events
        self._seen = BEGINNING

    async def wait(self, timeout_s: float) -> None:
        """Return when the stream is not where it was at the last return, or after `timeout_s`. Never raises.

        A Redis that hangs may add one `op_timeout_s`: cutting the read at the very end of its block would cost a
        connection each time that nothing happens.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline + self._link.op_timeout_s):
                while (left_s := deadline - loop.time()) > 0 and not await self._moved(left_s):
                    pass
        except TimeoutError:
            return

    async def _moved(self, left_s: float) -> bool:
        """Try once, for at most `BLOCK_S_MAX`; a Redis that does not answer costs `PAUSE_S`."""
        try:
            return await self._changed() or await self._written(min(left_s, BLOCK_S_MAX))
        except (StoreUnavailable, StoreMisused):
            await asyncio.sleep(min(left_s, PAUSE_S))
            return False

    async def _changed(self) -> bool:
        newest = items(await self._link.run("XREVRANGE", self._events, "+", "-", "COUNT", 1, what="TAIL"))
        last = text(items(newest[0])[0]) if newest else BEGINNING
        changed, self._seen = last != self._seen, last
        return changed

    async def _written(self, block_s: float) -> bool:
        block_ms = max(1, int(block_s * 1000))
        reply = await self._link.run(
            *("XREAD", "BLOCK", block_ms, "STREAMS", self._events, self._seen), what="TAIL", cap_s=block_s + 1.0
        )
        for _, entries in map(items, items(reply)):
            self._seen = text(items(items(entries)[-1])[0])
            return True
        return False
