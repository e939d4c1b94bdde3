"""Keeps this router on the list of members, with what it could do and how far it has followed.

The list is for people and for `narwhal ha status`; nothing is decided by it. Source: ha.md, 2.1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from narwhal.errors import StoreMisused, StoreUnavailable
from narwhal.ports import LeaseStore, Member

log = structlog.get_logger()

ANNOUNCE_EVERY_S = 2.0


async def announce_forever(store: LeaseStore, describe: Callable[[], Member]) -> None:
    """Announce what `describe` says every two seconds, and at once when it changes its role."""
    reachable = True
    while True:
        member = describe()
        try:
            await store.announce(member)
            reachable = True
        except (StoreUnavailable, StoreMisused) as error:
            if reachable:
                log.warning("announcement_failed", error=str(error))
            reachable = False
        await _until_next(lambda said=member.role: describe().role != said)  # type: ignore[misc]


async def _until_next(changed: Callable[[], bool]) -> None:
    for _ in range(int(ANNOUNCE_EVERY_S / 0.1)):
        await asyncio.sleep(0.1)
        if changed():
            return
