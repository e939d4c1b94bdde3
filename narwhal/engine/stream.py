"""A streaming decode leg: pushes whole frames into a sink as they arrive, under one timer.

No task wakes up for a token: the connection hands bytes to the scanner and the scanner's output goes straight to the
sink. The coroutines here wait only for the first token, for a full sink, and for the end. The timer is armed once and
re-armed when it fires early, so a token costs no timer work either.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from narwhal.core.faults import EngineFailedStatus, EngineFault, StreamBroken
from narwhal.engine.classify import LegKind, Mishap, fault
from narwhal.engine.connection import ANSWER_BYTES_MAX, Exchange
from narwhal.engine.http1 import Head
from narwhal.engine.sse import FrameScanner
from narwhal.engine.wire import RawAnswer, read_document
from narwhal.ports import ByteSink, EngineRefusal, Usage

END_GRACE_S: Final = 1.0
"""How long a complete stream may take to end its HTTP answer; then the connection is closed instead of kept."""


@dataclass(frozen=True, slots=True)
class StreamDeadlines:
    """Loop seconds for the first token and for the request as a whole, and the longest silence between two tokens."""

    first_token_at: float
    silence_s: float
    request_at: float


class EngineStream(Exchange):
    """One streaming decode, from the request to the terminal marker. See `narwhal.ports.DecodeStream`."""

    __slots__ = (
        "_answer",
        "_collected",
        "_collected_bytes",
        "_complete_at",
        "_congested",
        "_deadlines",
        "_engine",
        "_fault",
        "_head",
        "_loop",
        "_pending",
        "_progress_at",
        "_scanner",
        "_sink",
        "_streaming",
        "_timer",
        "_wake",
        "head",
    )

    def __init__(self, engine: str, *, choices: int, deadlines: StreamDeadlines) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._deadlines = deadlines
        self._scanner = FrameScanner(choices)
        self._streaming = False
        self._head: Head | None = None
        self._collected: list[bytes] = []
        self._collected_bytes = 0
        self._answer: RawAnswer | None = None
        self._pending: list[bytes] = []
        self._sink: ByteSink | None = None
        self._congested = False
        self._fault: EngineFault | None = None
        self._wake: asyncio.Future[None] | None = None
        self._progress_at = self._loop.time()
        self._complete_at: float | None = None
        self._timer = self._loop.call_at(self._due(), self._on_timer)
        self.head = b""

    @property
    def frames(self) -> int:
        """How many frames with choices have come."""
        return self._scanner.frames

    @property
    def usage(self) -> Usage | None:
        """The engine's token counts, if they have come."""
        return self._scanner.usage

    async def begin(self) -> EngineRefusal | None:
        """Return at the first real token, or with the engine's refusal. Raises an EngineFault."""
        while not (self._scanner.started or self.ended or self._fault is not None):
            await self._woken()
        if self._fault is not None:
            raise self._fault
        if self._answer is not None:
            refusal = read_document(self._answer, self._engine)
            if isinstance(refusal, EngineRefusal):
                return refusal
            raise EngineFailedStatus(f"engine {self._engine} answered a stream request with one document", status=200)
        self.head = b"".join(self._pending)
        self._pending.clear()
        self._rearm()
        return None

    async def pipe(self, sink: ByteSink) -> None:
        """Pass on everything after `head`; see the port."""
        self._sink = sink
        if self._pending:
            if not sink.write(b"".join(self._pending)):
                self._congest()
            self._pending.clear()
        while True:
            if self._congested:
                await self._drain(sink)
            elif self._fault is not None:
                raise self._fault
            elif self.ended:
                return
            else:
                await self._woken()

    def close(self) -> None:
        """Cancel the leg unless it is complete."""
        self._timer.cancel()
        self.abandon()

    def on_head(self, head: Head) -> None:
        """Tell a stream from an answer in one piece."""
        self._head = head
        self._streaming = head.status == 200 and head.text(b"content-type").startswith("text/event-stream")

    def on_body(self, data: bytes) -> None:
        """Push what may leave into the sink."""
        if not self._streaming:
            self._collect(data)
            return
        scanner = self._scanner
        frames = scanner.frames
        leaving = scanner.feed(data)
        if scanner.frames != frames:
            self._progress_at = self._loop.time()
        if leaving:
            if self._sink is not None:
                if not self._sink.write(leaving):
                    self._congest()
            else:
                self._pending.append(leaving)
                self._wake_up()
        if scanner.complete:
            self._completed()
        elif scanner.failure is not None:
            self._fail(StreamBroken(f"engine {self._engine}: {scanner.failure}"))

    def on_end(self) -> None:
        """The HTTP answer is complete; whether the stream is, the scanner knows."""
        self.ended = True
        self.connection = None
        if not self._streaming:
            assert self._head is not None
            self._answer = RawAnswer(self._head, b"".join(self._collected))
        else:
            self._scanner.at_end()
            if self._scanner.failure is not None:
                self._fail(StreamBroken(f"engine {self._engine}: {self._scanner.failure}"))
        self._wake_up()

    def on_mishap(self, mishap: Mishap) -> None:
        """The connection is gone; after the terminal marker nothing is lost."""
        self.ended = True
        self.connection = None
        if not self._scanner.complete:
            self._fail(fault(mishap, LegKind.STREAM, self._engine))
        self._wake_up()

    def _collect(self, data: bytes) -> None:
        self._collected.append(data)
        self._collected_bytes += len(data)
        if self._collected_bytes > ANSWER_BYTES_MAX:
            self._fail(fault(Mishap.GARBLED, LegKind.STREAM, self._engine))

    def _congest(self) -> None:
        """Read no more until the sink has drained."""
        if not self._congested:
            self._congested = True
            if self.connection is not None:
                self.connection.pause()
            self._wake_up()

    async def _drain(self, sink: ByteSink) -> None:
        """Wait for a client that reads slowly; that time is not the engine's."""
        try:
            async with asyncio.timeout_at(self._deadlines.request_at):
                await sink.drain()
        except TimeoutError as error:
            raise fault(Mishap.DEADLINE, LegKind.STREAM, self._engine) from error
        self._congested = False
        self._progress_at = self._loop.time()
        self._rearm()
        if self.connection is not None:
            self.connection.resume()

    def _completed(self) -> None:
        if self._complete_at is None:
            self._complete_at = self._loop.time()
            self._rearm()

    def _fail(self, error: EngineFault) -> None:
        if self._fault is None:
            self._fault = error
        self.abandon()
        self._wake_up()

    def _due(self) -> float:
        """Return when the timer has something to say, as things stand."""
        deadlines = self._deadlines
        if self._complete_at is not None:
            return self._complete_at + END_GRACE_S
        if not self._scanner.started:
            return min(deadlines.first_token_at, deadlines.request_at)
        if self._congested:
            return deadlines.request_at
        return min(self._progress_at + deadlines.silence_s, deadlines.request_at)

    def _rearm(self) -> None:
        """Set the timer anew where it may have become due earlier than it was set for."""
        self._timer.cancel()
        self._timer = self._loop.call_at(self._due(), self._on_timer)

    def _on_timer(self) -> None:
        due = self._due()
        if due > self._loop.time():
            self._timer = self._loop.call_at(due, self._on_timer)
            return
        if self._complete_at is not None:
            self.abandon()
            self._wake_up()
        elif due >= self._deadlines.request_at:
            self._fail(fault(Mishap.DEADLINE, LegKind.STREAM, self._engine))
        elif self._scanner.started:
            self._fail(fault(Mishap.SILENT, LegKind.STREAM, self._engine))
        else:
            self._fail(fault(Mishap.NEVER_STARTED, LegKind.STREAM, self._engine))

    async def _woken(self) -> None:
        self._wake = self._loop.create_future()
        await self._wake

    def _wake_up(self) -> None:
        wake = self._wake
        if wake is not None and not wake.done():
            wake.set_result(None)
