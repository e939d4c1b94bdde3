"""Server-sent events of a streaming completion, without IO: what may go to the client, and what the stream is worth.

Bytes may be split anywhere; only whole frames leave, unchanged. Nothing leaves before the first real token: comments,
the role frame of chat and empty frames are held back, so that an engine that fails early can still be answered with a
proper HTTP error. The usual piece (whole frames, no finish reason) is recognised by a few searches and never parsed.
Source: decision 11; an engine ends a failed stream with an error frame and `[DONE]` all the same.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from narwhal.engine.wire import FAILED_FINISHES, MESSAGE_CHARS_MAX, read_usage, strip_internal
from narwhal.ports import Usage

FRAME_BYTES_MAX: Final = 32 * 1024 * 1024
HELD_BYTES_MAX: Final = 64 * 1024
"""So many bytes of frames without a token count as a beginning: an engine that sends them is at work."""

UNFINISHED: Final = (b'"finish_reason":null', b'"finish_reason": null')
DONE: Final = b"[DONE]"
TEXTS: Final = (b'"text":"', b'"content":"')
NEVER: Final = b"\0"
"""No frame starts with it."""


class FrameScanner:
    """Reads one stream whose `choices` choices must all finish.

    `started`: the first real token has come. `complete`: every choice has finished and the terminal marker has come.
    `failure`: why the stream is broken, as the engine or its bytes say it; nothing leaves after it.
    """

    __slots__ = (
        "_choices",
        "_closing",
        "_finished",
        "_flowing",
        "_held",
        "_opening",
        "_parts",
        "_size",
        "_tail",
        "_unfinished",
        "complete",
        "failure",
        "frames",
        "started",
        "usage",
    )

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._finished: set[str] = set()
        self._flowing = False
        self._opening = NEVER
        self._closing = NEVER
        self._held: list[bytes] = []
        self._parts: list[bytes] = []
        self._size = 0
        self._tail = b""
        self._unfinished = UNFINISHED[0]
        self.started = False
        self.complete = False
        self.failure: str | None = None
        self.frames = 0
        self.usage: Usage | None = None

    def feed(self, data: bytes) -> bytes:
        """Take bytes in and return those that may go to the client now; `frames` grows when the stream gets on."""
        if self._flowing and not self._parts and data.endswith(b"\n\n"):
            if self._like_the_last(data):
                self.frames += 1
                return data
            count = data.count(b"\n\n")
            if self._unfinished_frames(data, count):
                if count == 1 and self._opening == NEVER:
                    self._learn(data)
                self.frames += count
                return data
        return self._feed_slowly(data)

    def at_end(self) -> None:
        """Take note that no more bytes will come."""
        if not self.complete and self.failure is None:
            unfinished = self._choices - len(self._finished)
            self.failure = (
                "the stream ended without its terminal marker"
                if unfinished <= 0
                else f"the stream ended before {unfinished} of {self._choices} choices had finished"
            )

    def _like_the_last(self, data: bytes) -> bool:
        """Whether `data` is one frame that differs from one that was read only in a text without quotes.

        Without a quote the text cannot end early, so what follows it is the known end of the frame.
        """
        opening, closing = self._opening, self._closing
        return (
            data.startswith(opening)
            and data.endswith(closing)
            and data.find(b'"', len(opening), len(data) - len(closing)) < 0
        )

    def _unfinished_frames(self, data: bytes, count: int) -> bool:
        """Whether `data` is `count` frames of which each says once that its choice goes on, and nothing else of note.

        Inside a JSON text every quote is escaped, so the words with their quotes are never part of one.
        """
        return (
            data.count(self._unfinished) == count == data.count(b'"finish_reason"')
            and b'"error"' not in data
            and b"[DONE]" not in data
            and b"_transfer_params" not in data
        )

    def _learn(self, frame: bytes) -> None:
        """Remember what surrounds the text of a frame that says nothing of note."""
        for mark in TEXTS:
            before, found, after = frame.partition(mark)
            text, quote, rest = after.partition(b'"')
            if found and quote and b"\\" not in text and mark not in rest:
                self._opening, self._closing = before + found, quote + rest

    def _feed_slowly(self, data: bytes) -> bytes:
        if self.failure is not None or self.complete:
            return b""
        probe = self._tail + data
        self._parts.append(data)
        self._size += len(data)
        if b"\n\n" not in probe and b"\n\r\n" not in probe:
            self._tail = probe[-2:]
            if self._size > FRAME_BYTES_MAX:
                self.failure = f"a frame of the stream is longer than {FRAME_BYTES_MAX} bytes"
            return b""
        frames, rest = split_frames(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
        self._parts = [rest] if rest else []
        self._size = len(rest)
        self._tail = rest[-2:]
        return b"".join(self._released(frames))

    def _released(self, frames: list[bytes]) -> list[bytes]:
        """Return what may leave of `frames`, with what was held back before it."""
        leaving: list[bytes] = []
        for frame in frames:
            if self.failure is not None or self.complete:
                break
            passed = self._read(frame)
            if passed and (self.started or frame_data(passed)):
                self._held.append(passed)
            self.started = self.started or sum(map(len, self._held)) > HELD_BYTES_MAX
            if self.started:
                leaving += self._held
                self._held.clear()
        self._flowing = self.started and not self.complete and self.failure is None
        return leaving

    def _read(self, frame: bytes) -> bytes:
        """Take one whole frame in and return it as the client may see it; empty when it must not."""
        data = frame_data(frame)
        if not data:
            return frame
        if data == DONE:
            return self._read_marker(frame)
        if self.started and self._unfinished_frames(frame, 1):
            self.frames += 1
            return frame
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError:
            document = None
        if not isinstance(document, dict):
            self.failure = "a frame of the stream is not a JSON object"
            return b""
        if (error := _error_in(document)) is not None:
            self.failure = error
            return b""
        self._read_choices(document, data)
        self.frames += 1
        self.usage = read_usage(document) or self.usage
        if self.failure is not None:
            return b""
        return b"data: %b\n\n" % orjson.dumps(document) if strip_internal(document) else frame

    def _read_marker(self, frame: bytes) -> bytes:
        if self.started and len(self._finished) >= self._choices:
            self.complete = True
            return frame
        self.at_end()
        return b""

    def _read_choices(self, document: dict[str, Any], data: bytes) -> None:
        choices = document.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            self.failure = "a frame of the stream carries no choices"
            return
        for choice in choices:
            reason = choice.get("finish_reason")
            if isinstance(reason, str) and reason in FAILED_FINISHES:
                self.failure = f"a choice of the stream finished with reason {reason!r}"
                return
            if reason:
                self._finished.add(str(choice.get("index", 0)))
            if not self.started and (reason or _has_token(choice)):
                self.started = True
                self._unfinished = UNFINISHED[1] if UNFINISHED[1] in data else UNFINISHED[0]


def split_frames(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole frames at the start of `data`, each with its blank line, and the rest."""
    frames: list[bytes] = []
    start = 0
    plain = data.find(b"\n\n")
    with_return = data.find(b"\n\r\n")
    while plain >= 0 or with_return >= 0:
        end = plain + 2 if plain >= 0 and (with_return < 0 or plain < with_return) else with_return + 3
        frames.append(data[start:end])
        start = end
        if 0 <= plain < start:
            plain = data.find(b"\n\n", start)
        if 0 <= with_return < start:
            with_return = data.find(b"\n\r\n", start)
    return frames, data[start:]


def frame_data(frame: bytes) -> bytes:
    """Return the data of a frame; empty for a comment or a frame that carries only other fields."""
    if frame.startswith(b"data:") and frame.find(b"\n") >= len(frame) - 3:
        return frame[5:].strip()
    lines = (line for line in frame.splitlines() if line.startswith(b"data:"))
    return b"\n".join([line[5:].strip() for line in lines])


def _error_in(document: dict[str, Any]) -> str | None:
    error = document.get("error")
    if not error and document.get("object") != "error":
        return None
    text = error.get("message") if isinstance(error, dict) else error or document.get("message")
    return str(text or "the engine reported an error")[:MESSAGE_CHARS_MAX]


def _has_token(choice: dict[str, Any]) -> bool:
    """Whether a choice carries anything beside a role and emptiness."""
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role")
