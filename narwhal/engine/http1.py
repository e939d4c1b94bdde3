"""HTTP/1.1 as a client speaks it, without IO: bytes in, calls on a sink out.

Written by hand because the relay passes every token through here: a chunked stream costs one search and one slice per
chunk, and no task wakes up for it. What is not plain HTTP/1.1 is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from narwhal import __version__

HEAD_BYTES_MAX: Final = 64 * 1024
CHUNK_LINE_BYTES_MAX: Final = 1024
CRLF: Final = b"\r\n"
BLANK_LINE: Final = b"\r\n\r\n"
BODILESS: Final = frozenset({204, 304})
DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class HttpViolation(Exception):
    """The peer sent something that is not a well-formed HTTP/1.1 answer."""


class Origin(NamedTuple):
    """Where requests to one base address go. `prefix` is the path that the address carries, without trailing slash."""

    host: str
    port: int
    tls: bool
    authority: str
    prefix: str

    @classmethod
    def of(cls, url: str) -> Origin:
        """Return the origin of an http(s) base address."""
        parts = urlsplit(url)
        assert parts.hostname is not None, f"{url!r} has no host; the configuration refuses it"
        port = parts.port or DEFAULT_PORTS[parts.scheme]
        return cls(parts.hostname, port, parts.scheme == "https", parts.netloc, parts.path.rstrip("/"))


def encode_request(method: str, origin: Origin, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return the request as one piece. Raises ValueError when a header would smuggle in a line."""
    fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if fields.count("\n") != len(headers):
        raise ValueError("a header value must not contain a line break")
    content = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
    head = (
        f"{method} {origin.prefix}{path} HTTP/1.1\r\nHost: {origin.authority}\r\n"
        f"User-Agent: narwhal/{__version__}\r\n{content}{fields}\r\n"
    )
    return head.encode("latin-1") + body


class Head(NamedTuple):
    """Status and headers of an answer; names are lower case."""

    status: int
    headers: Mapping[bytes, bytes]

    def text(self, name: bytes) -> str:
        """Return the value of a header, empty when it is absent."""
        return self.headers.get(name, b"").decode("latin-1")


class ResponseSink(Protocol):
    """Takes one answer in, in this order: one head, any number of body pieces, one end."""

    def on_head(self, head: Head) -> None:
        """Take status and headers."""
        ...

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body, without its transfer framing."""
        ...

    def on_end(self) -> None:
        """The answer is complete."""
        ...


_HEAD, _COUNTED, _CHUNKED, _TRAILERS, _UNTIL_CLOSE, _DONE = range(6)
"""What a parser expects next. Plain numbers: an enumeration costs a look-up for every chunk."""


class ResponseParser:
    """Reads exactly one answer and hands it to a sink.

    `started`: a byte of the answer has come. `complete`: all of it has. `reusable`: the connection may carry another
    request; only meaningful when complete.
    """

    __slots__ = ("_buffer", "_left", "_mode", "_sink", "complete", "reusable", "started")

    def __init__(self, sink: ResponseSink) -> None:
        self._sink = sink
        self._buffer = b""
        self._left = 0
        self._mode = _HEAD
        self.started = False
        self.complete = False
        self.reusable = True

    def feed(self, data: bytes) -> None:
        """Take bytes from the connection. Raises HttpViolation."""
        mode = self._mode
        if mode == _CHUNKED:
            self._feed_chunked(data)
        elif mode == _HEAD:
            self._feed_head(data)
        elif mode == _COUNTED:
            self._feed_counted(data)
        elif mode == _UNTIL_CLOSE:
            self._sink.on_body(data)
        elif mode == _TRAILERS:
            self._feed_trailers(data)
        else:
            self.reusable = False

    def feed_eof(self) -> bool:
        """Take the end of the connection; return whether the answer is complete with it."""
        if self._mode == _UNTIL_CLOSE:
            self._end()
        return self.complete

    def _end(self) -> None:
        self._mode = _DONE
        self.complete = True
        self._sink.on_end()

    def _feed_head(self, data: bytes) -> None:
        self.started = True
        data = self._buffer + data if self._buffer else data
        end = data.find(BLANK_LINE)
        if end < 0:
            if len(data) > HEAD_BYTES_MAX:
                raise HttpViolation(f"the head of the answer is longer than {HEAD_BYTES_MAX} bytes")
            self._buffer = data
            return
        self._buffer = b""
        rest = data[end + 4 :]
        head, version = _parse_head(data[:end])
        if 100 <= head.status < 200:
            if head.status == 101:
                raise HttpViolation("the engine changed the protocol unasked")
            if rest:
                self._feed_head(rest)
            return
        self._begin_body(head, version)
        self._sink.on_head(head)
        if self._mode == _COUNTED and self._left == 0:
            self._end()
        if rest:
            self.feed(rest)

    def _begin_body(self, head: Head, version: bytes) -> None:
        connection = head.headers.get(b"connection", b"").lower()
        self.reusable = b"close" not in connection if version == b"1" else b"keep-alive" in connection
        coding = head.headers.get(b"transfer-encoding")
        length = head.headers.get(b"content-length")
        if head.status in BODILESS:
            self._mode, self._left = _COUNTED, 0
        elif coding is not None:
            if coding.lower() != b"chunked":
                raise HttpViolation(f"unknown transfer encoding {coding!r}")
            self._mode = _CHUNKED
        elif length is not None:
            if not length.isdigit():
                raise HttpViolation(f"content length {length!r} is not a number")
            self._mode, self._left = _COUNTED, int(length)
        else:
            self._mode, self.reusable = _UNTIL_CLOSE, False

    def _feed_counted(self, data: bytes) -> None:
        if len(data) > self._left:
            self.reusable = False
            data = data[: self._left]
        self._left -= len(data)
        self._sink.on_body(data)
        if self._left == 0:
            self._end()

    def _feed_chunked(self, data: bytes) -> None:
        """Take chunks; `_left` counts what is still to come of the current one, its line break included."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        parts: list[bytes] = []
        size, position, left, length = len(data), 0, self._left, -1
        while position < size:
            if left == 0:
                end = data.find(CRLF, position)
                length = _chunk_length(data[position:end]) if end >= 0 else self._await_line(data[position:])
                if length <= 0:
                    break
                position, left = end + 2, length + 2
            elif left > 2:
                piece = data[position : position + left - 2]
                parts.append(piece)
                position += len(piece)
                left -= len(piece)
            else:
                piece = data[position : position + left]
                if piece != CRLF[2 - left : 2 - left + len(piece)]:
                    raise HttpViolation("a chunk is longer than its size line says")
                position += len(piece)
                left -= len(piece)
        self._left = left
        if parts:
            self._sink.on_body(parts[0] if len(parts) == 1 else b"".join(parts))
        if length == 0:
            self._mode = _TRAILERS
            self._feed_trailers(data[end:])

    def _await_line(self, data: bytes) -> int:
        """Keep the beginning of a size line for later; -1 says that there is no length yet."""
        if len(data) > CHUNK_LINE_BYTES_MAX:
            raise HttpViolation("the size line of a chunk does not end")
        self._buffer = data
        return -1

    def _feed_trailers(self, data: bytes) -> None:
        data = self._buffer + data
        end = data.find(BLANK_LINE)
        if end < 0:
            if len(data) > HEAD_BYTES_MAX:
                raise HttpViolation("the trailers of the answer do not end")
            self._buffer = data
            return
        if end + 4 < len(data):
            self.reusable = False
        self._end()


def _parse_head(block: bytes) -> tuple[Head, bytes]:
    """Return the head and the minor version. Raises HttpViolation."""
    lines = block.split(CRLF)
    status_line = lines[0]
    if not status_line.startswith(b"HTTP/1.") or status_line[8:9] != b" " or not status_line[9:12].isdigit():
        raise HttpViolation(f"not an HTTP/1 status line: {status_line[:80]!r}")
    headers: dict[bytes, bytes] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or name != name.strip():
            raise HttpViolation(f"not a header: {line[:80]!r}")
        name, value = name.lower(), value.strip()
        if name not in headers:
            headers[name] = value
        elif name != b"content-length":
            headers[name] += b", " + value
        elif headers[name] != value:
            raise HttpViolation("two different content lengths")
    return Head(int(status_line[9:12]), headers), status_line[7:8]


def _chunk_length(line: bytes) -> int:
    digits = line.partition(b";")[0].strip() if b";" in line else line
    if not digits.isalnum() or len(digits) > 16:
        raise HttpViolation(f"not a chunk size: {line[:80]!r}")
    try:
        return int(digits, 16)
    except ValueError:
        raise HttpViolation(f"not a chunk size: {line[:80]!r}") from None
