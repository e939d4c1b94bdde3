"""How one router of a simulated world sees another one: its /ready, and whether its process lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from narwhal.core.lease import LeaseRecord
from narwhal.core.vocabulary import PeerSign
from narwhal.ports import PeerLook
from narwhal.testing.history import History
from narwhal.testing.network import Network
from narwhal.testing.world_store import WorldRedis

LIFELINE_EVERY_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a router finds in the world.

    `ask_ready` asks the router at a host and calls back with its answer. `ask_kernel` asks the host itself whether a
    process of it is dead; it answers also while the process is frozen.
    """

    history: History
    redis: WorldRedis
    network: Network
    ask_ready: Callable[[str, Callable[[PeerLook], None]], None]
    ask_kernel: Callable[[str], bool]


class WorldPeer:
    """The `RouterPeer` of `narwhal.ports`: /ready of another router of the world, over the simulated network."""

    def __init__(self, around: Surroundings, host: str) -> None:
        self._around = around
        self._host = host

    async def look(self, url: str, *, timeout_s: float) -> PeerLook:
        """Return what that router says of itself, through the product's own reading of it."""
        target, network = url.removeprefix("http://"), self._around.network
        answer: asyncio.Future[PeerLook] = asyncio.get_running_loop().create_future()

        def reply(look: PeerLook) -> None:
            network.send(target, self._host, lambda: None if answer.done() else answer.set_result(look))

        network.send(self._host, target, lambda: self._around.ask_ready(target, reply))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return PeerLook(PeerSign.TIMEOUT, detail="no answer in time")


class WorldHolderWatch:
    """The `HolderWatch` of `narwhal.ports`: the holder's host is asked over the network until it says so."""

    def __init__(self, around: Surroundings, host: str) -> None:
        self._around = around
        self._host = host
        self._dead: set[str] = set()

    async def death(self, holder: LeaseRecord) -> str:
        """Return once the host has told that the process is dead."""
        while holder.incarnation not in self._dead:
            self._around.network.send(self._host, holder.router, lambda: self._ask(holder))
            await asyncio.sleep(LIFELINE_EVERY_S)
        return "its host says so"

    def _ask(self, holder: LeaseRecord) -> None:
        if self._around.ask_kernel(holder.incarnation):
            told = holder.incarnation
            self._around.network.send(holder.router, self._host, lambda: self._dead.add(told))
