"""One kept HTTP connection for tiny questions, so that asking hundreds of times a second costs next to nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

HEAD_BYTES_MAX: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its status, its headers in lower case, its JSON object."""

    status: int
    headers: Mapping[str, str]
    document: Mapping[str, Any]


class Door:
    """A connection to one server, opened again when the server closes it."""

    def __init__(self, url: str) -> None:
        self._address = url.removeprefix("http://")
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self, path: str) -> Answer:
        """Return the answer to a GET. Raises OSError, EOFError or ValueError when there is no such answer."""
        return await self._ask(f"GET {path} HTTP/1.1\r\nHost: {self._address}\r\n\r\n".encode())

    async def post(self, path: str, document: Mapping[str, Any]) -> Answer:
        """Return the answer to a POST of `document`. Raises as `get`."""
        body = json.dumps(document).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._address}\r\nContent-Type: application/json\r\n"
        return await self._ask(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _ask(self, request: bytes) -> Answer:
        if self._streams is None:
            host, _, port = self._address.partition(":")
            self._streams = await asyncio.open_connection(host, int(port), limit=HEAD_BYTES_MAX)
        reader, writer = self._streams
        writer.write(request)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        except asyncio.LimitOverrunError as error:
            raise ValueError("the head of the answer is too long") from error
        headers = dict(_headers(head))
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if headers.get("connection") == "close":
            self.close()
        document = json.loads(body)
        if not isinstance(document, dict):
            raise ValueError("the answer is no JSON object")  # noqa: TRY004 - as every other unreadable answer
        return Answer(int(head.split(" ", 2)[1]), headers, document)


def _headers(head: str) -> Iterator[tuple[str, str]]:
    for line in head.splitlines()[1:]:
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()
