"""docs/failure-classes.md and the code say the same, in both directions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from narwhal.core.evidence import ACTION, CLEARS
from narwhal.core.faults import EngineFault
from narwhal.core.holds import RULES
from narwhal.core.vocabulary import FailureClass
from narwhal.engine import wire
from narwhal.engine.classify import BY_HUNDREDS, BY_STATUS, FAULTS, LegKind, Verdict, verdict
from narwhal.engine.http1 import Head
from narwhal.engine.sse import FrameScanner
from narwhal.engine.wire import RawAnswer
from narwhal.ports import EngineRefusal, NothingPinned
from narwhal.serving.outcomes import TOLD
from tests.engine.legs import DONE, RESULT, TICKET, token

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "failure-classes.md"
NONE: Final = "—"


def table(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, its first row being the head."""
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert section is not None, heading
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def by_first(heading: str) -> dict[str, list[str]]:
    rows = table(heading)[1:]
    found = {re.sub(r"^`([^`]+)`$", r"\1", row[0]): row[1:] for row in rows}
    assert len(found) == len(rows), "a row stands there twice"
    return found


def code(word: str | None) -> str:
    return NONE if word is None else f"`{word}`"


def words(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def test_every_mishap_on_every_leg() -> None:
    head, *rows = table("On the way")
    kinds = [LegKind(cell.strip("`")) for cell in head[1:]]
    assert set(kinds) == set(LegKind)
    assert {row[0]: row[1:] for row in rows} == {
        str(mishap): [code(row[kind].failure_class) for kind in kinds] for mishap, row in FAULTS.items()
    }


STATUSES: Final[Mapping[str, list[tuple[int, bytes, bool]]]] = {
    "408, 429": [(408, b"", False), (429, b"", False), (429, b"", True)],
    "503 with `Retry-After`, or whose body says that it is busy": [(503, b"", True), (503, b"engine busy", False)],
    "503 whose body says `paused` or `sleep`": [(503, b"is paused", False), (503, b"sleeping", True)],
    "any other 503, 5xx, 3xx, or 2xx that is not 200": [
        (503, b"EngineCore encountered an issue", False),
        *((status, b"busy", True) for status in (*range(201, 400), *range(500, 503), *range(504, 600))),
    ],
    "any other 4xx": [(status, b"busy", True) for status in range(400, 500) if status not in (408, 429)],
}
CLASS_OF: Final = {
    Verdict.REFUSED: None,
    Verdict.OVERLOADED: FailureClass.OVERLOAD,
    Verdict.PAUSED: FailureClass.INFERENCE_STATUS,
    Verdict.FAILED: FailureClass.INFERENCE_STATUS,
}


def test_every_status() -> None:
    rows = by_first("By status")
    assert rows.keys() == STATUSES.keys()
    for answer, examples in STATUSES.items():
        for status, body, retry_after in examples:
            found = verdict(status, body, retry_after=retry_after)
            clears = code("client_error") if found is Verdict.REFUSED else ""
            assert rows[answer] == [code(CLASS_OF[found]), clears], (answer, status)
    assert set(BY_STATUS) == {408, 429}
    assert set(BY_HUNDREDS) == {2, 3, 4, 5}


def answered(document: Any) -> Callable[[], object]:
    """Read an answer in one piece, as the last leg does."""

    def read() -> object:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        result = wire.read_document(RawAnswer(Head(200, {}), body), "e")
        assert not isinstance(result, EngineRefusal)
        return wire.read_choices(result, "e")

    return read


def prefilled(params: Any) -> Callable[[], object]:
    return lambda: wire.read_ticket({**RESULT, "kv_transfer_params": params}, "e")


def streamed(*frames: bytes) -> Callable[[], object]:
    """Read a stream to its end; it must fail."""

    def read() -> object:
        scanner = FrameScanner(1)
        for frame in frames:
            scanner.feed(frame)
        scanner.at_end()
        assert scanner.failure is not None
        return FailureClass.STREAM

    return read


def choice(reason: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "a", "finish_reason": reason}]}


A: Final = token("a")
END: Final = token("b", "stop")
ERROR: Final = b'data: {"error":{"message":"died"}}\n\n'

CONTENTS: Final[Mapping[str, list[Callable[[], object]]]] = {
    "an error document": [answered({"error": {"message": "x"}}), answered({"object": "error", "message": "x"})],
    "no JSON object, or an empty body": [answered(b"<html>"), answered([1]), answered(b"")],
    "no choices": [answered({}), answered({"choices": None}), answered({"choices": []})],
    "a choice without a finish reason": [answered(choice(None)), answered(choice(""))],
    "a choice that finished with `abort` or `error`": [answered(choice("abort")), answered(choice("error"))],
    "a prefill without a ticket": [prefilled(None)],
    "a prefill whose ticket is malformed": [prefilled({**TICKET, "remote_port": "x"}), prefilled({}), prefilled([])],
    "a prefill that pinned no block": [prefilled({**TICKET, "remote_block_ids": [[]]})],
    "a stream with an error frame, whatever follows": [streamed(A, ERROR, DONE), streamed(ERROR, A, END, DONE)],
    "a stream with a frame that is no JSON object": [streamed(A, b"data: x\n\n", END, DONE)],
    "a stream with a frame without choices": [streamed(A, b'data: {"id":"x"}\n\n', END, DONE)],
    "a stream with a choice that finished with `abort` or `error`": [
        streamed(A, token("b", "abort"), DONE),
        streamed(A, token("b", "error"), DONE),
    ],
    "a stream with `[DONE]` before every choice has finished": [streamed(A, DONE), streamed(DONE)],
    "a stream that ends before every choice has finished": [streamed(A), streamed()],
    "a stream that ends without `[DONE]`": [streamed(A, END)],
}


def class_seen(read: Callable[[], object]) -> str | None:
    try:
        result = read()
    except EngineFault as fault:
        return fault.failure_class
    assert isinstance(result, NothingPinned | FailureClass), "the answer was good"
    return None if isinstance(result, NothingPinned) else result


def test_every_answer_under_200_is_on_the_page() -> None:
    assert by_first("By content, under 200").keys() == CONTENTS.keys()


@pytest.mark.parametrize("answer", CONTENTS)
def test_an_answer_under_200_has_the_class_of_its_row(answer: str) -> None:
    (cell,) = by_first("By content, under 200")[answer]
    assert [code(class_seen(read)) for read in CONTENTS[answer]] == [cell] * len(CONTENTS[answer])


def faults() -> dict[str, type[EngineFault]]:
    """Every exception of the product that an engine's doing may raise."""
    found, todo = {}, [EngineFault]
    while todo:
        kind = todo.pop()
        found[kind.__name__] = kind
        todo += [sub for sub in kind.__subclasses__() if sub.__module__.startswith("narwhal.")]
    return found


def test_every_exception() -> None:
    expected = {}
    for name, kind in faults().items():
        told = next(TOLD[cls] for cls in kind.__mro__ if cls in TOLD)
        expected[name] = [code(kind.failure_class), str(told.status), code(told.code)]
    assert by_first("As exceptions") == expected


def test_every_action() -> None:
    assert by_first("From class to action") == {str(c): [code(action)] for c, action in ACTION.items()}


def test_every_clearing_success() -> None:
    rows = {success: words(cell) for success, (cell,) in by_first("What clears a streak").items()}
    assert rows == {str(success): {str(c) for c in classes} for success, classes in CLEARS.items()}


def test_every_hold() -> None:
    yes = {True: "yes", False: "no"}
    assert by_first("Holds") == {
        str(kind): [yes[rule.yields_to_last_engine], yes[rule.health_ends_it], yes[rule.inference_ends_it]]
        for kind, rule in RULES.items()
    }
