"""A stream of tokens as vLLM sends it, one HTTP chunk a frame, and the faults that befall it half-way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from aiohttp import web

from narwhal.testing.stub_engine.answers import DONE, INTERNAL_ERROR, KEEP_ALIVE, Framer, error_frame
from narwhal.testing.stub_engine.bodies import Job
from narwhal.testing.stub_engine.engine import StubEngine
from narwhal.testing.stub_engine.faults import FaultKind
from narwhal.testing.stub_engine.schedule import Plan
from narwhal.testing.stub_engine.state import Residence, wall_s
from narwhal.testing.stub_engine.trouble import sever

_SPLIT_PAUSE_S = 0.001


class TokenStream:
    """One streamed answer. Call `open`, then either `run` or `fail`."""

    def __init__(self, engine: StubEngine, request: web.Request, job: Job, plan: Plan, residence: Residence) -> None:
        self._engine = engine
        self._request = request
        self._job = job
        self._plan = plan
        self._residence = residence
        self._response = web.StreamResponse()
        self._framer = Framer(job, model=engine.model, created=int(wall_s()), fingerprint=engine.fingerprint)
        self._split = plan.get(FaultKind.SPLIT) is not None
        self._interruptions = {
            fault.after: kind
            for kind in (FaultKind.SILENCE, FaultKind.CUT, FaultKind.ERROR_FRAME)
            if (fault := plan.get(kind)) is not None
        }

    async def open(self, headers: dict[str, str]) -> None:
        """Send the headers and, for chat, the role frame of every choice: both come before any token."""
        self._response.headers.update({"Content-Type": "text/event-stream; charset=utf-8", **headers})
        await self._response.prepare(self._request)
        if self._job.chat:
            for choice in range(len(self._job.prompts) * self._job.n):
                await self._write(self._framer.role(choice))

    async def fail(self, message: str) -> web.StreamResponse:
        """End the stream as vLLM ends one that failed: an error frame, and the terminal marker all the same."""
        await self._write(error_frame(message))
        await self._write(DONE)
        await self._response.write_eof()
        return self._response

    async def run(self, words: Sequence[Iterator[str]], *, itl_s: float) -> web.StreamResponse:
        """Send the tokens, `itl_s` seconds apart, and end the stream."""
        await self._hold_first_token()
        no_finish = self._plan.get(FaultKind.NO_FINISH)
        last = self._job.max_tokens - 1
        loop = asyncio.get_running_loop()
        due = loop.time()
        for index in range(self._job.max_tokens):
            if index in self._interruptions and await self._interrupted(index):
                return await self.fail(INTERNAL_ERROR)
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self._engine.until_resumed()
            finish = self._job.finish_reason if index == last and no_finish is None else None
            await self._send_tokens(words, index, finish)
            due = max(due, loop.time() - itl_s) + itl_s
        if await self._interrupted(self._job.max_tokens):
            return await self.fail(INTERNAL_ERROR)
        return await self._finish(done=no_finish is None or no_finish.done, made=len(words) * self._job.max_tokens)

    async def _send_tokens(self, words: Sequence[Iterator[str]], index: int, finish: str | None) -> None:
        """Send the frame of token `index` of every choice."""
        big = self._plan.get(FaultKind.BIG_FRAME) if index == 0 else None
        for choice, tokens in enumerate(words):
            frame = self._framer.token(
                choice, next(tokens), last=finish, made=index + 1, padding=0 if big is None else big.size_bytes
            )
            await self._write(frame)
        self._engine.state.tokens_generated += len(words)

    async def _finish(self, *, done: bool, made: int) -> web.StreamResponse:
        if self._job.include_usage:
            await self._write(self._framer.final_usage(made))
        if done:
            await self._write(DONE)
        await self._response.write_eof()
        return self._response

    async def _hold_first_token(self) -> None:
        """Stay silent before the first token while a fault says so, but for comments if it asks for them."""
        fault = self._plan.get(FaultKind.NO_FIRST_TOKEN)
        if fault is None:
            return
        lifted = asyncio.ensure_future(self._plan.until_lifted(FaultKind.NO_FIRST_TOKEN))
        pause_s = None if fault.keepalive_ms is None else max(fault.keepalive_ms / 1000, _SPLIT_PAUSE_S)
        try:
            while not lifted.done():
                await asyncio.wait([lifted], timeout=pause_s)
                if pause_s is not None and not lifted.done():
                    await self._write(KEEP_ALIVE)
        finally:
            lifted.cancel()

    async def _interrupted(self, made: int) -> bool:
        """Let a fault act that is due after `made` tokens, or later than the last. True if the stream is to fail."""
        due = [
            kind
            for after, kind in self._interruptions.items()
            if after == made or (made == self._job.max_tokens and after > made)
        ]
        if FaultKind.SILENCE in due:
            await self._plan.until_lifted(FaultKind.SILENCE)
        if FaultKind.CUT in due:
            await sever(self._request, self._residence, with_reset=False)
        return FaultKind.ERROR_FRAME in due

    async def _write(self, frame: bytes) -> None:
        if not self._split:
            await self._response.write(frame)
            return
        for piece in _pieces(frame):
            await self._response.write(piece)
            await asyncio.sleep(_SPLIT_PAUSE_S)


def _pieces(frame: bytes) -> Iterator[bytes]:
    """Cut a frame inside "data:" and after the first byte of every character of several bytes."""
    cuts = [3, *(at + 1 for at, byte in enumerate(frame) if byte >= 0xC0), len(frame)]
    before = 0
    for cut in sorted(set(cuts)):
        yield frame[before:cut]
        before = cut
