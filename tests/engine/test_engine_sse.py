"""The frame scanner: whole frames leave unchanged, nothing leaves before the first token, and success is earned."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal.engine.sse import FrameScanner, split_frames

DONE = b"data: [DONE]\n\n"


def frame(document: dict[str, Any], *, end: bytes = b"\n\n") -> bytes:
    return b"data: " + orjson.dumps(document) + end


def text(content: str, finish: str | None = None, index: int = 0) -> bytes:
    return frame({"id": "c", "choices": [{"index": index, "text": content, "finish_reason": finish}]})


def chat(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return frame({"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


ROLE = chat({"role": "assistant", "content": ""})
USAGE = frame({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 7, "total_tokens": 11}})
ERROR = b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}\n\n'


def scan(*pieces: bytes, choices: int = 1) -> tuple[FrameScanner, list[bytes]]:
    scanner = FrameScanner(choices)
    return scanner, [scanner.feed(piece) for piece in pieces]


STREAMS = [
    text("Hello") + text(" wörld 漢字 🐋") + text("", "stop") + USAGE + DONE,
    ROLE + chat({"content": "Hi"}) + chat({"content": ""}, "length") + DONE,
    text('say "finish_reason":null and "error"') + text("x", "stop") + DONE,
    frame({"choices": [{"index": 0, "text": "a", "finish_reason": None}]}, end=b"\r\n\r\n") + text("b", "stop") + DONE,
    b": hello\n\n" + text("a") + b": keep-alive\n\n" + text("b", "stop") + b"event: x\ndata: [DONE]\n\n",
    text("a") + text("b") + text("c") + text("d", "length") + DONE,
]


@pytest.mark.parametrize("stream", STREAMS)
@given(data=st.data())
def test_the_same_bytes_leave_however_the_stream_is_split(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    scanner, left = scan(*pieces)
    assert b"".join(left) == stream.removeprefix(b": hello\n\n")
    assert (scanner.complete, scanner.failure) == (True, None)
    for out in left:
        assert out == b"" or out.endswith((b"\n\n", b"\r\n\r\n")), "only whole frames leave"


def test_the_role_frame_waits_for_the_first_token() -> None:
    scanner, left = scan(b": ping\n\n", ROLE, b": ping\n\n")
    assert (left, scanner.started) == ([b"", b"", b""], False)
    assert scanner.feed(chat({"content": "Hi"})) == ROLE + chat({"content": "Hi"})
    assert scanner.started


@pytest.mark.parametrize(
    "first",
    [
        text("a"),
        text("", "stop"),
        chat({"content": "a"}),
        chat({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}),
        chat({"reasoning_content": "hm"}),
        chat({"role": "assistant", "content": "a"}),
        chat({}, "stop"),
    ],
)
def test_a_token_or_a_finish_begins_the_stream(first: bytes) -> None:
    scanner, _ = scan(first)
    assert scanner.started


@pytest.mark.parametrize("first", [ROLE, text(""), chat({"content": "", "tool_calls": []}), USAGE, b": keep-alive\n\n"])
def test_emptiness_does_not_begin_the_stream(first: bytes) -> None:
    scanner, left = scan(first)
    assert (scanner.started, left) == (False, [b""])


def test_frames_without_a_token_are_not_held_without_bound() -> None:
    scanner, left = scan(*[text("")] * 3000)
    assert scanner.started
    assert b"".join(left) == text("") * 3000


def test_the_marker_alone_is_no_success() -> None:
    scanner, left = scan(text("a"), DONE)
    assert (scanner.complete, b"".join(left)) == (False, text("a"))
    assert scanner.failure is not None
    assert "1 of 1 choices" in scanner.failure


def test_a_finish_reason_without_the_marker_is_no_success() -> None:
    scanner, _ = scan(text("a", "stop"))
    scanner.at_end()
    assert scanner.failure == "the stream ended without its terminal marker"


def test_every_choice_must_finish() -> None:
    streams = [(text("a", "stop", 0) + text("b", "stop", 1) + DONE, True), (text("a", "stop", 0) * 2 + DONE, False)]
    for stream, complete in streams:
        scanner, _ = scan(stream, choices=2)
        assert scanner.complete is complete


@pytest.mark.parametrize("before", [b"", ROLE, text("a"), text("a") + text("b", "stop")])
@pytest.mark.parametrize(
    "error",
    [ERROR, frame({"error": "engine died"}), frame({"object": "error", "message": "engine died"})],
)
def test_an_error_frame_fails_the_stream_and_does_not_leave(before: bytes, error: bytes) -> None:
    scanner, left = scan(before + error + DONE)
    assert not scanner.complete
    assert scanner.failure in ("Internal server error", "engine died")
    assert b"error" not in b"".join(left)
    assert b"[DONE]" not in b"".join(left)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_aborted_choice_fails_the_stream(reason: str) -> None:
    scanner, left = scan(text("a"), text("", reason), DONE)
    assert scanner.failure is not None
    assert b"".join(left) == text("a")


@pytest.mark.parametrize("bad", [b"data: {oops\n\n", b"data: 7\n\n", frame({"id": "x"}), frame({"choices": None})])
def test_an_unreadable_frame_fails_the_stream(bad: bytes) -> None:
    scanner, left = scan(text("a"), bad)
    assert scanner.failure is not None
    assert b"".join(left) == text("a")


@pytest.mark.parametrize("choices", [[7], "x", [None]])
def test_choices_of_a_strange_shape_fail_the_stream(choices: Any) -> None:
    scanner, _ = scan(frame({"choices": choices}))
    assert scanner.failure == "a frame of the stream carries no choices"


def test_a_finish_reason_that_is_an_object_still_finishes() -> None:
    stream = frame({"choices": [{"index": 0, "text": "a", "finish_reason": {"type": "stop"}}]}) + DONE
    assert scan(stream)[0].complete


def test_internal_addresses_are_taken_out_of_the_last_frame() -> None:
    last = {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]}
    secret = {"kv_transfer_params": {"remote_host": "10.0.0.7"}, "ec_transfer_params": {"peer": "10.0.0.8"}}
    for before in (b"", text("a")):
        scanner, left = scan(before, frame({**last, **secret}), DONE)
        assert b"10.0.0." not in b"".join(left)
        assert scanner.complete
    harmless = frame({**last, "kv_transfer_params": None})
    assert scan(text("a"), harmless, DONE)[1][1] == harmless


def test_internal_addresses_are_taken_out_of_any_frame() -> None:
    leak = frame(
        {"choices": [{"index": 0, "text": "b", "finish_reason": None}], "kv_transfer_params": {"remote_host": "h"}}
    )
    assert b"remote_host" not in scan(text("a"), leak)[1][1]


def test_usage_is_read_where_it_comes() -> None:
    scanner, _ = scan(text("a"), text("b", "stop"), USAGE, DONE)
    assert scanner.usage == (4, 7)
    spread = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}
    assert scan(frame(spread), DONE)[0].usage == (None, 2)


def test_frames_are_counted_and_comments_are_not() -> None:
    scanner, _ = scan(text("a"), b": ping\n\n", text("b") + text("c"), b": ping\n\n")
    assert scanner.frames == 3


def test_a_frame_with_spaces_in_its_json_takes_the_fast_way_too() -> None:
    spaced = b"data: " + json.dumps({"choices": [{"index": 0, "text": "a", "finish_reason": None}]}).encode() + b"\n\n"
    scanner, left = scan(spaced, spaced * 3)
    assert (left[1], scanner.frames) == (spaced * 3, 4)


def test_several_choices_in_one_frame_do_not_hide_an_ending() -> None:
    two = frame({"choices": [{"index": i, "text": "a", "finish_reason": None} for i in range(2)]})
    finish = frame({"choices": [{"index": i, "text": "", "finish_reason": "stop"} for i in range(2)]})
    scanner, left = scan(text("a"), two + finish, DONE, choices=2)
    assert scanner.complete
    assert b"".join(left) == text("a") + two + finish + DONE


def test_a_frame_of_three_megabytes_passes_whole() -> None:
    big = text("x" * 3_000_000)
    pieces = [big[i : i + 65536] for i in range(0, len(big), 65536)]
    scanner, left = scan(text("a"), *pieces, text("", "stop") + DONE)
    assert b"".join(left[1:-1]) == big
    assert scanner.complete


def test_a_frame_without_end_is_given_up() -> None:
    scanner = FrameScanner(1)
    for _ in range(40):
        assert scanner.feed(b"data: " + b"x" * 1_000_000) == b""
    assert scanner.failure is not None
    assert "longer than" in scanner.failure


def test_nothing_leaves_after_the_marker() -> None:
    scanner, left = scan(text("a", "stop") + DONE + text("more"), text("and more"))
    assert b"".join(left) == text("a", "stop") + DONE
    assert scanner.complete


@given(st.lists(st.sampled_from([b"\n", b"\r\n", b"data: x", b": c", b"\n\n", b"\r\n\r\n", b"\n\r\n"]), max_size=12))
def test_splitting_loses_no_byte(parts: list[bytes]) -> None:
    data = b"".join(parts)
    frames, rest = split_frames(data)
    assert b"".join(frames) + rest == data
    assert all(f.endswith((b"\n\n", b"\n\r\n")) for f in frames)
    assert b"\n\n" not in rest
    assert b"\n\r\n" not in rest


NASTY = [
    '","finish_reason":null',
    '"error"',
    "[DONE]",
    "\\",
    '\\"',
    "\n\n",
    "data: [DONE]\n\n",
    "🐋",
    '"finish_reason":"stop"',
    "",
]


@given(
    texts=st.lists(st.sampled_from(NASTY) | st.text(max_size=8), max_size=20),
    ending=st.sampled_from(["done", "error", "cut", "no finish"]),
    merged=st.sets(st.integers(0, 24)),
)
def test_no_text_is_taken_for_structure(texts: list[str], ending: str, merged: set[int]) -> None:
    """Whatever a model says, in whichever pieces it comes: the bytes pass, and only a real ending ends the stream."""
    frames = [text("first"), *map(text, texts)]
    tail = {"done": [text("", "stop"), DONE], "error": [ERROR, DONE], "cut": [], "no finish": [DONE]}[ending]
    pieces: list[bytes] = []
    for number, piece in enumerate([*frames, *tail]):
        if number in merged and pieces:
            pieces[-1] += piece
        else:
            pieces.append(piece)
    scanner, left = scan(*pieces)
    scanner.at_end()
    assert b"".join(left) == b"".join(frames + (tail if ending == "done" else []))
    assert scanner.complete is (ending == "done")
    assert (scanner.failure is None) is (ending == "done")
    assert scanner.frames == len(frames) + (ending == "done")
