"""Whom an inference probe convicts: every combination of findings that a plan can yield."""

from __future__ import annotations

import pytest

from narwhal.core.events import PairFinding
from narwhal.core.verdict import judge
from narwhal.core.vocabulary import EngineId, Leg, ProbeResult, Role
from tests.core.fleets import D1, D2, P1, P2, broke, served, unclear

PASSED, FAILED, INCONCLUSIVE = ProbeResult.PASSED, ProbeResult.FAILED, ProbeResult.INCONCLUSIVE

Word = str
"""How one pair of a probe ended: `ok`, `own` leg or `other` leg of the suspect failed, or `?`."""

TWO_PARTNERS: list[tuple[list[Word], ProbeResult, int | None]] = [
    ([], INCONCLUSIVE, None),
    (["ok"], PASSED, None),
    (["own"], FAILED, None),
    (["other"], INCONCLUSIVE, None),
    (["?"], INCONCLUSIVE, None),
    (["?", "ok"], PASSED, None),
    (["?", "own"], FAILED, None),
    (["?", "other"], INCONCLUSIVE, None),
    (["?", "?"], INCONCLUSIVE, None),
    (["own", "own"], FAILED, None),
    (["own", "other"], FAILED, None),
    (["own", "?"], FAILED, None),
    (["other", "own"], FAILED, None),
    (["other", "?"], INCONCLUSIVE, None),
    (["other", "ok"], PASSED, 0),
]
"""What follows for either role; the last column is the partner that becomes suspect, by position."""

BY_ROLE = {
    Role.DECODE: [
        *TWO_PARTNERS,
        (["own", "ok"], PASSED, 0),  # the KV of the first prefill is what the suspect could not use
        (["other", "other"], INCONCLUSIVE, None),
    ],
    Role.PREFILL: [
        *TWO_PARTNERS,
        (["own", "ok"], PASSED, None),  # no decode engine had a part in a prefill that failed
        (["other", "other"], FAILED, None),  # two decode engines could not use the KV of the suspect
    ],
}

ROWS = [(role, *row) for role, rows in BY_ROLE.items() for row in rows]


def finding(word: Word, prefill: EngineId, decode: EngineId, own: Leg) -> PairFinding:
    other = Leg.DECODE if own is Leg.PREFILL else Leg.PREFILL
    match word:
        case "ok":
            return served(prefill, decode)
        case "own":
            return broke(prefill, decode, own)
        case "other":
            return broke(prefill, decode, other)
        case _:
            return unclear(prefill, decode)


@pytest.mark.parametrize(("role", "words", "result", "next_suspect"), ROWS)
def test_the_verdict_over_two_partners(
    role: Role, words: list[Word], result: ProbeResult, next_suspect: int | None
) -> None:
    suspect, partners = (D1, [P1, P2]) if role is Role.DECODE else (P1, [D1, D2])
    findings = []
    for word, partner in zip(words, partners, strict=False):
        pair = (partner, suspect) if role is Role.DECODE else (suspect, partner)
        findings.append(finding(word, *pair, own=Leg(role.value)))
    verdict = judge(suspect, role, tuple(findings))
    assert verdict.result is result
    assert verdict.next_suspect == (None if next_suspect is None else partners[next_suspect])


def test_every_combination_of_two_partners_has_a_row() -> None:
    after_first = {(first, second) for first in ("own", "other", "?") for second in ("ok", "own", "other", "?")}
    expected = {(), ("ok",), ("own",), ("other",), ("?",), *after_first}
    for rows in BY_ROLE.values():
        assert {tuple(words) for words, _, _ in rows} == expected


CROSS_CHECK = [
    # The suspect with the only prefill, then another decode engine with the same prefill.
    (broke(P1, D1, Leg.DECODE), served(P1, D2), FAILED, None),
    (broke(P1, D1, Leg.DECODE), broke(P1, D2, Leg.DECODE), INCONCLUSIVE, P1),
    (broke(P1, D1, Leg.DECODE), broke(P1, D2, Leg.PREFILL), FAILED, None),
    (broke(P1, D1, Leg.DECODE), unclear(P1, D2), FAILED, None),
    (broke(P1, D1, Leg.PREFILL), served(P1, D2), INCONCLUSIVE, None),
    (broke(P1, D1, Leg.PREFILL), broke(P1, D2, Leg.DECODE), INCONCLUSIVE, None),
    (broke(P1, D1, Leg.PREFILL), broke(P1, D2, Leg.PREFILL), INCONCLUSIVE, None),
    (broke(P1, D1, Leg.PREFILL), unclear(P1, D2), INCONCLUSIVE, None),
    (unclear(P1, D1), served(P1, D2), INCONCLUSIVE, None),
    (unclear(P1, D1), broke(P1, D2, Leg.DECODE), INCONCLUSIVE, None),
    (unclear(P1, D1), broke(P1, D2, Leg.PREFILL), INCONCLUSIVE, None),
    (unclear(P1, D1), unclear(P1, D2), INCONCLUSIVE, None),
]


@pytest.mark.parametrize(("own", "cross", "result", "next_suspect"), CROSS_CHECK)
def test_the_verdict_over_a_sole_prefill_with_a_cross_check(
    own: PairFinding, cross: PairFinding, result: ProbeResult, next_suspect: EngineId | None
) -> None:
    verdict = judge(D1, Role.DECODE, (own, cross))
    assert (verdict.result, verdict.next_suspect) == (result, next_suspect)


def test_a_conviction_says_what_was_seen() -> None:
    assert judge(D1, Role.DECODE, (broke(P1, D1, Leg.DECODE),)).detail == "decode leg of p1+d1"
    poisoner = judge(P1, Role.PREFILL, (broke(P1, D1, Leg.DECODE), broke(P1, D2, Leg.DECODE)))
    assert poisoner.detail == "d1 and d2 could not use its KV: decode leg of p1+d1"


def test_an_inconclusive_probe_says_why() -> None:
    assert judge(D1, Role.DECODE, ()).detail == "no pair could be tried"
    both = (unclear(P1, D1), broke(P2, D1, Leg.PREFILL))
    assert judge(D1, Role.DECODE, both).detail == "pool full for p1+d1; prefill leg of p2+d1"
    cross = judge(D1, Role.DECODE, (broke(P1, D1, Leg.DECODE), broke(P1, D2, Leg.DECODE)))
    assert cross.detail == "d2 failed with p1 too: decode leg of p1+d2"
