"""Asks both routers' /ready every few milliseconds: the drill's load balancer follows it, and it witnesses overlaps.

Each sample is bounded by two instants of the lease clock: the answer was true somewhere between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from narwhal.demo.clock import lease_clock
from narwhal.demo.wire import Door

EVERY_S: Final = 0.008
TIMEOUT_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a router's /ready, asked at `sent_at` and answered by `received_at` (lease clock, seconds)."""

    router: str
    sent_at: float
    received_at: float
    ready: bool
    token: int | None
    reason: str


class Prober:
    """Probes until it is cancelled. `serving` is the router that said yes last and has not said no since."""

    def __init__(self, routers: Mapping[str, str]) -> None:
        self.urls = dict(routers)
        self.samples: list[Sample] = []
        self._latest: dict[str, Sample] = {}

    @property
    def serving(self) -> str | None:
        """The router to send traffic to now; of two the one with the higher token, None when there is none."""
        ready = [sample for sample in self._latest.values() if sample.ready]
        return max(ready, key=lambda sample: sample.token or 0).router if ready else None

    def note(self, sample: Sample) -> None:
        """Take in one look."""
        self.samples.append(sample)
        self._latest[sample.router] = sample

    async def run(self) -> None:
        """Probe every router for ever."""
        async with asyncio.TaskGroup() as group:
            for router, url in self.urls.items():
                group.create_task(self._watch(router, url), name=f"probe-{router}")

    async def _watch(self, router: str, url: str) -> None:
        door = Door(url)
        loop = asyncio.get_running_loop()
        try:
            while True:
                started_at = loop.time()
                self.note(await self._look(router, door))
                await asyncio.sleep(max(0.001, started_at + EVERY_S - loop.time()))
        finally:
            door.close()

    @staticmethod
    async def _look(router: str, door: Door) -> Sample:
        sent_at = lease_clock()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await door.get("/ready")
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            door.close()
            return Sample(router, sent_at, lease_clock(), False, None, type(error).__name__)
        said = answer.document
        return Sample(
            router, sent_at, lease_clock(), answer.status == 200, said.get("fencing_token"), str(said.get("reason"))
        )
