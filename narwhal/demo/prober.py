"""Asks both routers' /ready every few milliseconds: the drill's load balancer follows it, and it witnesses overlaps.

Each sample is bounded by two instants of the lease clock: the answer was true somewhere between them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from narwhal.demo.clock import lease_clock

EVERY_S: Final = 0.008
TIMEOUT_S: Final = 0.5
HEAD_BYTES_MAX: Final = 16 * 1024


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
        door = ReadyDoor(url)
        loop = asyncio.get_running_loop()
        try:
            while True:
                started_at = loop.time()
                self.note(await self._look(router, door))
                await asyncio.sleep(max(0.001, started_at + EVERY_S - loop.time()))
        finally:
            door.close()

    @staticmethod
    async def _look(router: str, door: ReadyDoor) -> Sample:
        sent_at = lease_clock()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, document = await door.ask()
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            door.close()
            return Sample(router, sent_at, lease_clock(), False, None, type(error).__name__)
        token = document.get("fencing_token")
        return Sample(router, sent_at, lease_clock(), status == 200, token, str(document.get("reason")))


class ReadyDoor:
    """One kept connection to a router's /ready, opened again when the router closes it."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._host, self._port = host, int(port)
        self._request = f"GET /ready HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self) -> tuple[int, dict[str, Any]]:
        """Return status and document. Raises OSError, EOFError or ValueError when there is no such answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=HEAD_BYTES_MAX)
        reader, writer = self._streams
        writer.write(self._request)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        except asyncio.LimitOverrunError as error:
            raise ValueError("the head of the answer is too long") from error
        status = int(head.split(" ", 2)[1])
        headers = dict(_headers(head.splitlines()[1:]))
        body = await reader.readexactly(int(headers["content-length"]) if "content-length" in headers else 0)
        if headers.get("connection") == "close":
            self.close()
        document = json.loads(body)
        if not isinstance(document, dict):
            raise ValueError("/ready did not answer an object")  # noqa: TRY004 - as every other unreadable answer
        return status, document

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _headers(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()
