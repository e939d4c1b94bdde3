"""What a standby sees of the holder without the store: its /ready, and whether its process lives.

Neither moves the lease. Both only tell the core, which decides what follows, and wake whoever waits for news.
Source: decisions 7 and 8; ha.md, 2.8.
"""

from __future__ import annotations

import asyncio

import structlog

from narwhal.config import HaSection
from narwhal.core.lease import LeaseRecord
from narwhal.core.takeover import Takeover
from narwhal.core.vocabulary import FencingToken, PeerSign, RouterId
from narwhal.ports import HolderWatch, RouterPeer

log = structlog.get_logger()


class Lookout:
    """Watches whoever was last seen to hold the lease.

    `ready_at` is when, in loop seconds, a holder last called itself ready.
    """

    def __init__(self, own_id: RouterId, ha: HaSection, *, peer: RouterPeer, holder_watch: HolderWatch) -> None:
        self._own_id = own_id
        self._ha = ha
        self._peer = peer
        self._holder_watch = holder_watch
        self._changed = asyncio.Event()
        self.news = asyncio.Event()
        self.holder: LeaseRecord | None = None
        self.ready_at: float | None = None

    def saw_holder(self, holder: LeaseRecord) -> None:
        """Turn to `holder`, unless it is watched already."""
        if self.holder is None or not holder.same_term(self.holder):
            self.holder = holder
            self._changed.set()

    async def watch_peer(self, takeover: Takeover) -> None:
        """Look at the holder's /ready at a fixed rate and tell the core what it said."""
        while True:
            holder = self.holder
            if holder is not None and holder.router != self._own_id:
                look = await self._peer.look(holder.url, timeout_s=self._ha.peer_timeout_s)
                takeover.saw_peer(look.sign, look.token)
                if look.sign is PeerSign.READY:
                    self.ready_at = asyncio.get_running_loop().time()
                if takeover.misses:
                    log.debug("active_missed", sign=look.sign, misses=takeover.misses, detail=look.detail)
                if look.term_over and look.token == holder.token:
                    self._tell(takeover, holder.token, "its holder says that its term is over")
            await asyncio.sleep(self._ha.peer_poll_every_s)

    async def watch_life(self, takeover: Takeover, *, own_incarnation: str) -> None:
        """Tell the core when the process that holds the lease is proven dead."""
        while True:
            holder = self.holder
            self._changed.clear()
            if holder is not None and holder.incarnation != own_incarnation:
                proof = await self._death_while_watched(holder)
                if proof is None:
                    continue
                log.warning("holder_died", holder=holder.router, fencing_token=holder.token, proof=proof)
                self._tell(takeover, holder.token, f"its holder is dead: {proof}")
            await self._changed.wait()

    async def _death_while_watched(self, holder: LeaseRecord) -> str | None:
        """Return the proof that `holder` is dead, or None when another one holds by now."""
        death = asyncio.create_task(self._holder_watch.death(holder), name="watch-death")
        changed = asyncio.create_task(self._changed.wait(), name="holder-changed")
        try:
            await asyncio.wait({death, changed}, return_when=asyncio.FIRST_COMPLETED)
            return death.result() if death.done() else None
        finally:
            for task in (death, changed):
                task.cancel()
            await asyncio.wait({death, changed})

    def _tell(self, takeover: Takeover, token: FencingToken, why: str) -> None:
        takeover.term_is_over(token, why)
        self.news.set()
