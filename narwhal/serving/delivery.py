"""Delivers a decode stream to the client: whole frames, chunk by chunk, straight onto its connection."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from narwhal.core.faults import EngineFault
from narwhal.ports import DecodeStream
from narwhal.serving.attempt import LegWatch
from narwhal.serving.outcomes import Outcome, told
from narwhal.serving.record import RequestRecord

STREAM_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ClientSink:
    """Writes to the client's connection, in HTTP chunks where its version has them."""

    __slots__ = ("_chunked", "_protocol", "_transport", "_writer")

    def __init__(self, request: web.BaseRequest, writer: AbstractStreamWriter) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client left before its answer began")
        self._transport = transport
        self._protocol = request.protocol
        self._writer = writer
        self._chunked = request.version >= HttpVersion11

    def write(self, data: bytes) -> bool:
        """Send `data`; False when the client's connection is full."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return not self._protocol.writing_paused

    async def drain(self) -> None:
        """Return when the client has taken enough. Raises ConnectionError when it is gone."""
        await self._writer.drain()


async def deliver(
    stream: DecodeStream, request: web.BaseRequest, headers: dict[str, str], record: RequestRecord, watch: LegWatch
) -> web.StreamResponse:
    """Send a stream that has begun, to its end.

    If it breaks, the client gets an error frame as the last one and no `[DONE]`: an OpenAI client raises on the frame,
    and one that knows only the marker does not take the answer for complete. No finish reason is made up.
    """
    record.first_token_at = asyncio.get_running_loop().time()
    response = web.StreamResponse(headers={**STREAM_HEADERS, **headers})
    writer = await response.prepare(request)
    assert writer is not None, "a response is prepared once"
    sink = ClientSink(request, writer)
    sink.write(stream.head)
    record.ended(200, Outcome.SERVED)
    try:
        await stream.pipe(sink)
        watch.succeeded()
    except EngineFault as fault:
        watch.failed(fault)
        error, _ = told(fault, sent=True)
        record.ended(200, Outcome.BROKEN, str(fault))
        sink.write(error.frame())
    finally:
        record.frames, record.usage = stream.frames, stream.usage
    return response
