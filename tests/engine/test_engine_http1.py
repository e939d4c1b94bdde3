"""The HTTP/1.1 answer parser: the same answer however the bytes are split, and nothing guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal.engine.http1 import Head, HttpViolation, Origin, ResponseParser, encode_request


class Taken:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.body = b""
        self.ends = 0

    def on_head(self, head: Head) -> None:
        assert self.head is None
        self.head = head

    def on_body(self, data: bytes) -> None:
        assert self.head is not None and self.ends == 0  # noqa: PT018 - one order, one assertion
        self.body += data

    def on_end(self) -> None:
        self.ends += 1


def read(*pieces: bytes, eof: bool = False) -> tuple[Taken, ResponseParser]:
    taken = Taken()
    parser = ResponseParser(taken)
    for piece in pieces:
        parser.feed(piece)
    if eof:
        parser.feed_eof()
    return taken, parser


COUNTED = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n{"a":1}'
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5;ext=1\r\nda\r\na\r\n1A\r\n" + b"x" * 26 + b"\r\n0\r\nTrailer: t\r\n\r\n"
)
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + COUNTED
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
WHOLE = [
    (COUNTED, b'{"a":1}'),
    (CHUNKED, b"da\r\na" + b"x" * 26),
    (CONTINUED, b'{"a":1}'),
    (EMPTY, b""),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
]


@pytest.mark.parametrize(("wire", "body"), WHOLE)
@given(data=st.data())
def test_an_answer_is_the_same_however_it_is_split(wire: bytes, body: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(wire) - 1), max_size=8)))
    pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    taken, parser = read(*pieces)
    assert (taken.body, taken.ends, parser.complete, parser.reusable) == (body, 1, True, True)


def test_an_answer_byte_by_byte_is_read() -> None:
    taken, parser = read(*[CHUNKED[i : i + 1] for i in range(len(CHUNKED))])
    assert (taken.body, parser.complete) == (b"da\r\na" + b"x" * 26, True)


def test_the_end_of_the_connection_ends_only_an_answer_without_length() -> None:
    taken, parser = read(b"HTTP/1.1 200 OK\r\n\r\nabc", b"def", eof=True)
    assert (taken.body, taken.ends, parser.complete, parser.reusable) == (b"abcdef", 1, True, False)
    for cut in (COUNTED[:-1], CHUNKED[:-2], COUNTED[:30]):
        taken, parser = read(cut, eof=True)
        assert (taken.ends, parser.complete) == (0, False)


@pytest.mark.parametrize(
    ("head", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close", False),
        (b"HTTP/1.1 200 OK\r\nConnection: Keep-Alive, Close", False),
        (b"HTTP/1.1 200 OK\r\nConnection: keep-alive", True),
        (b"HTTP/1.0 200 OK\r\nX: y", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive", True),
    ],
)
def test_a_connection_is_kept_only_if_the_engine_keeps_it(head: bytes, reusable: bool) -> None:
    _, parser = read(head + b"\r\nContent-Length: 1\r\n\r\nx")
    assert (parser.complete, parser.reusable) == (True, reusable)


def test_bytes_after_the_end_make_the_connection_useless() -> None:
    for surplus in (COUNTED + b"HTTP", CHUNKED + b"x"):
        taken, parser = read(surplus)
        assert (taken.ends, parser.reusable) == (1, False)


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length : 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n+3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 2000,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
    ],
)
def test_what_is_not_an_http_answer_is_refused(wire: bytes) -> None:
    with pytest.raises(HttpViolation):
        read(wire)


def test_header_names_ignore_case_and_repeated_ones_are_joined() -> None:
    taken, _ = read(b"HTTP/1.1 429 Slow\r\nRETRY-after:  2 \r\nVary: a\r\nvary: b\r\nContent-Length: 0\r\n\r\n")
    assert taken.head is not None
    assert (taken.head.status, taken.head.text(b"retry-after"), taken.head.text(b"vary")) == (429, "2", "a, b")


def test_a_request_carries_host_length_and_headers_once() -> None:
    origin = Origin.of("http://engine:8000/base/")
    wire = encode_request("POST", origin, "/v1/completions", {"X-Request-Id": "r-1"}, b"{}")
    assert wire.startswith(b"POST /base/v1/completions HTTP/1.1\r\nHost: engine:8000\r\n")
    assert wire.endswith(b"Content-Length: 2\r\nX-Request-Id: r-1\r\n\r\n{}")


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, False, "127.0.0.1:8000")),
        ("http://[::1]:8000", ("::1", 8000, False, "[::1]:8000")),
        ("https://engine", ("engine", 443, True, "engine")),
    ],
)
def test_an_address_says_where_to_connect(url: str, where: tuple[str, int, bool, str]) -> None:
    origin = Origin.of(url)
    assert (origin.host, origin.port, origin.tls, origin.authority) == where


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\nb"])
def test_a_header_cannot_smuggle_in_a_line(value: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        encode_request("GET", Origin.of("http://e"), "/", {"X": value}, b"")
