"""Scenario files: what stands in one, and how it is played against the core.

    shows: <a sentence of the source, exactly as in sentences.txt>
    fleet: prefill p1 p2, decode d1 d2
    set: recovery.eject_after = 2

    +0.5s  d1 decode refused the connection
        -> d1 ejected (connection, streak 2): engine d1 refused the connection

Comments begin with #. `+0.5s` is the time since the last input; the lines that begin with an arrow are what the core
answered. `written_anew` plays the inputs and puts what the core answers now in their place: a file is right if that
changes nothing.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from narwhal.config import Config, parse_config
from narwhal.core.vocabulary import Role
from tests.scenarios.inputs import answer
from tests.scenarios.router import ScenarioRouter

FOLDER: Final = Path(__file__).parent
FILES: Final = sorted(FOLDER.glob("[0-9][0-9]-*.txt"))

ARROW: Final = "    -> "
INPUT: Final = re.compile(r"\+(?P<after_s>\d+(?:\.\d+)?)s  (?P<what>\S.*)")
HEADER: Final = re.compile(r"(?P<key>shows|fleet|set): (?P<value>\S.*)")


class Unreadable(ValueError):
    """A scenario file says something that nobody understands; the message names the line."""


def headers(text: str, key: str) -> Iterator[str]:
    """Yield the values of the header lines `key`, in order."""
    for line in text.splitlines():
        if (header := HEADER.fullmatch(line)) and header["key"] == key:
            yield header["value"]


def config_of(text: str) -> Config:
    """Return the configuration that the `fleet` and `set` lines make; everything else has its default."""
    engines = []
    for part in ",".join(headers(text, "fleet")).split(","):
        role, *ids = part.split() or [""]
        if role not in set(Role):
            raise Unreadable(f"fleet: not 'prefill <ids>, decode <ids>': {part!r}")
        engines += [{"id": name, "url": f"http://{name}:8000", "role": role} for name in ids]
    settings = tomllib.loads("\n".join(headers(text, "set")))
    return parse_config({"serving": {"models": ["m"]}, "engines": engines, **settings}, source="scenario")


def written_anew(text: str) -> str:
    """Return `text` with what the core answers now. Raises Unreadable, naming the line."""
    router = ScenarioRouter(config_of(text))
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(ARROW):
            continue
        lines.append(line)
        if step := INPUT.fullmatch(line):
            router.wait(float(step["after_s"]))
            try:
                answers = answer(router, step["what"])
            except (KeyError, ValueError) as error:
                raise Unreadable(f"line {number}: {line!r}: {error}") from error
            lines += [f"{ARROW}{said}" for said in answers or ["nothing"]]
        elif line and not line.startswith("#") and not HEADER.fullmatch(line):
            raise Unreadable(f"line {number}: neither comment, header, input nor answer: {line!r}")
    return "\n".join(lines) + "\n"
