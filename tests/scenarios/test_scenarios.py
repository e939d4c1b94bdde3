"""Every scenario file is what the core answers, and every sentence that they are about is shown by one of them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.scenarios.inputs import ROWS
from tests.scenarios.script import FILES, FOLDER, INPUT, Unreadable, headers, written_anew

ROOT: Final = FOLDER.parent.parent

SENTENCES_OF: Final = {
    "Monitoring and readiness": 10,
    "Engine failure handling: Connection pools": 2,
    "Engine failure handling: Failure evidence": 13,
    "Engine failure handling: Liveness": 3,
    "Engine failure handling: Last-engine protection": 3,
    "Engine failure handling: Clearing failure evidence": 4,
    "Engine failure handling: Failure quarantine": 3,
}
"""How many sentences and table rows each section of the source has, so that none gets lost."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_scenario_goes_as_it_is_written(file: Path) -> None:
    written = file.read_text()
    if difference := "\n".join(differences(written, file.name)):
        pytest.fail(f"if this change is meant, `make golden` writes it down:\n{difference}", pytrace=False)


def differences(written: str, name: str) -> list[str]:
    now = written_anew(written)
    return list(unified_diff(written.splitlines(), now.splitlines(), name, "the core", n=3, lineterm=""))


# The runner itself.

GOOD = """\
# A comment.
fleet: prefill p1, decode d1
set: recovery.eject_after = 1

+0s  d1 decode refused the connection
    -> d1 ejected (connection, streak 1): engine d1 refused the connection (streaming decode leg)
+1s  ready?
    -> ready: 503 no eligible decode engine
"""


def test_a_right_scenario_is_written_anew_as_it_was() -> None:
    assert written_anew(GOOD) == GOOD


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("streak 1", "streak 2"),
        ("    -> ready: 503 no eligible decode engine\n", ""),
        ("    -> ready", "    -> p1 ejected (liveness)\n    -> ready"),
        ("eject_after = 1", "eject_after = 2"),
    ],
    ids=["another answer", "an answer is missing", "an answer too many", "another setting"],
)
def test_whatever_differs_is_shown(before: str, after: str) -> None:
    assert before in GOOD
    assert differences(GOOD.replace(before, after), "file")


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ("refused the connection\n", "was rude\n", "line 5: '+0s  d1 decode was rude'"),
        ("d1 decode refused", "d7 decode refused", "line 5: .*d7"),
        ("+1s  ready?", "+1s  is it ready?", "line 7: .*nobody knows this input"),
        ("+1s  ready?", "+1s ready?", "line 7: neither comment, header, input nor answer"),
        ("set: ", "sets: ", "line 3: neither comment, header, input nor answer"),
        ("decode d1\n", "decoder d1\n", "fleet: .*decoder"),
    ],
    ids=["mishap", "engine", "input", "spacing", "header", "role"],
)
def test_what_nobody_understands_is_refused(before: str, after: str, what: str) -> None:
    assert before in GOOD
    with pytest.raises(Unreadable, match=re.escape(what).replace(r"\.\*", ".*")):
        written_anew(GOOD.replace(before, after, 1))


def test_every_way_of_saying_what_happens_is_used() -> None:
    said = [step["what"] for file in FILES for line in file.read_text().splitlines() if (step := INPUT.fullmatch(line))]
    assert [pattern for pattern, _ in ROWS if not any(re.fullmatch(pattern, what) for what in said)] == []


# The sentences.


@dataclass(frozen=True)
class Sentence:
    """One line of sentences.txt, and the scenarios (`10-name`) and tests (`path::name`) below it."""

    section: str
    text: str
    shown_by: tuple[str, ...]

    @property
    def scenarios(self) -> set[str]:
        return {name for name in self.shown_by if "::" not in name}

    @property
    def tests(self) -> set[str]:
        return set(self.shown_by) - self.scenarios


def read_sentences() -> Iterator[Sentence]:
    section = ""
    text: str | None = None
    shown_by: list[str] = []
    for line in [*(FOLDER / "sentences.txt").read_text().splitlines(), "#"]:
        if line.startswith("    "):
            shown_by.append(line.strip())
            continue
        if text is not None:
            yield Sentence(section, text, tuple(shown_by))
            text, shown_by = None, []
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line and not line.startswith("#"):
            text = line


SENTENCES: Final = list(read_sentences())
sentences = pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence.text[:40])


def test_no_sentence_of_the_source_is_missing() -> None:
    assert Counter(sentence.section for sentence in SENTENCES) == SENTENCES_OF
    assert len({sentence.text for sentence in SENTENCES}) == len(SENTENCES)


@sentences
def test_every_sentence_is_shown_by_the_scenarios_that_quote_it(sentence: Sentence) -> None:
    assert sentence.shown_by
    assert sentence.scenarios == {file.stem for file in FILES if sentence.text in headers(file.read_text(), "shows")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_scenario_quotes_nothing_but_sentences_of_the_source(file: Path) -> None:
    quoted = list(headers(file.read_text(), "shows"))
    assert quoted
    assert set(quoted) - {sentence.text for sentence in SENTENCES} == set()


@pytest.mark.parametrize("test", sorted({test for sentence in SENTENCES for test in sentence.tests}))
def test_a_test_that_shows_a_sentence_exists(test: str) -> None:
    path, _, name = test.partition("::")
    assert name in functions_in(ROOT / path)


@cache
def functions_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(), filename=str(path))
    return frozenset(n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
