"""How a refused handoff write is told: the same words for Redis, the local file and the memory twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from narwhal.core.vocabulary import FencingToken

Order: TypeAlias = tuple[FencingToken, int]
Verdict: TypeAlias = Literal["STALE_TOKEN", "NOT_HOLDER", "VERSION"]


def refusal(verdict: str, written: Order, numbers: Sequence[int]) -> str:
    """Return why the document with order `written` was refused, naming both sides' numbers.

    `numbers`: STALE_TOKEN the highest token seen; NOT_HOLDER the holder's token (0: no lease) and the highest seen;
    VERSION the stored version.
    """
    token, version = written
    match verdict, *numbers:
        case "STALE_TOKEN", seen:
            why = f"fencing token {token} is older than {seen}: another router took over, this one must fence"
        case "NOT_HOLDER", 0, seen:
            why = f"nobody holds the lease and fencing token {token} is not the last one granted ({seen})"
        case "NOT_HOLDER", holder, _:
            why = f"fencing token {token} is not the lease holder's, which is {holder}"
        case "VERSION", stored:
            why = f"version {version} under fencing token {token} does not follow the stored version {stored}"
        case _:
            why = f"answer {verdict} {list(numbers)}"
    return f"handoff refused ({verdict}): {why}"
