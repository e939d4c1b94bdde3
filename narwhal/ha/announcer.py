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
LOOK_EVERY_S = 0.2


async def announce_forever(store: LeaseStore, describe: Callable[[], Member]) -> None:
    """Announce what `describe` says every two seconds, and at once when its role or its eligibility changes."""
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
        await _until_due(member, describe)


async def _until_due(announced: Member, describe: Callable[[], Member]) -> None:
    loop = asyncio.get_running_loop()
    due_at = loop.time() + ANNOUNCE_EVERY_S
    while (left_s := due_at - loop.time()) > 0:
        await asyncio.sleep(min(LOOK_EVERY_S, left_s))
        member = describe()
        if (member.role, member.eligible) != (announced.role, announced.eligible):
            return
