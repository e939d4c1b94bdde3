"""The drill's judgement: it must be able to say no. Each test makes up what a broken pair would leave behind."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from narwhal.demo.drill import Findings
from narwhal.demo.evidence import (
    Admission,
    Term,
    bounded_by_death,
    first_admission_after,
    not_carried,
    overlap_ms,
    read_admissions,
    ready_overlap_ms,
    terms,
)
from narwhal.demo.load import Attempt, Death
from narwhal.demo.prober import Sample


def admissions(*facts: tuple[int, float]) -> list[Admission]:
    return [Admission("router-a" if token == 1 else "router-b", token, at) for token, at in facts]


def sound() -> Findings:
    """Findings of a drill in which everything held."""
    return Findings(token_before=1, token_after=2, takeover_ms=1800.0, ok=100, failed_in_flight=3, lease_ttl_s=2.0)


def test_terms_one_after_the_other_do_not_overlap() -> None:
    found = terms(admissions((1, 10.0), (1, 11.0), (2, 13.0), (2, 14.0)))
    assert [(term.first, term.last, term.count) for term in found] == [(10.0, 11.0, 2), (13.0, 14.0, 2)]
    assert overlap_ms(found) == 0


@pytest.mark.parametrize(
    ("facts", "expected_ms"),
    [
        pytest.param([(1, 10.0), (1, 12.0), (2, 11.5), (2, 14.0)], 500.0, id="both admit for a while"),
        pytest.param([(1, 10.0), (2, 11.0), (1, 11.002)], 2.0, id="one late admission of the old term"),
        pytest.param([(2, 10.0), (2, 11.0), (1, 12.0)], 2000.0, id="the lower token admits after the higher began"),
    ],
)
def test_an_old_term_that_admits_after_a_newer_one_began_is_an_overlap(
    facts: list[tuple[int, float]], expected_ms: float
) -> None:
    assert overlap_ms(terms(admissions(*facts))) == pytest.approx(expected_ms)


def test_what_the_dead_router_admitted_unlogged_counts_when_a_client_saw_it() -> None:
    logged = Term(token=1, router="router-a", first=10.0, last=11.0, count=5)
    seen = Attempt("router-a", sent_at=11.8, admitted_by=11.9)
    stretched = bounded_by_death(logged, [seen], Death("router-a", killed_at=12.0, gone_at=12.001))
    assert stretched.last == 11.9
    early = Term(token=2, router="router-b", first=11.85, last=13.0, count=5)
    assert overlap_ms([logged, early]) == 0
    assert overlap_ms([stretched, early]) == pytest.approx(50.0)


def test_a_dead_router_admits_nothing_after_its_death() -> None:
    logged = Term(token=1, router="router-a", first=10.0, last=11.0, count=5)
    late_look = Attempt("router-a", sent_at=11.9, admitted_by=12.5)
    assert bounded_by_death(logged, [late_look], Death("router-a", 12.0, 12.001)).last == 12.001


def test_requests_on_the_other_router_do_not_stretch_the_dead_ones_term() -> None:
    logged = Term(token=1, router="router-a", first=10.0, last=11.0, count=5)
    other = Attempt("router-b", sent_at=11.5, admitted_by=11.9)
    assert bounded_by_death(logged, [other], Death("router-a", 12.0, 12.001)) == logged


def sample(router: str, token: int, sent_at: float, received_at: float, *, ready: bool = True) -> Sample:
    return Sample(router, sent_at, received_at, ready, token, "active")


def test_two_routers_that_surely_were_ready_at_once_are_an_overlap() -> None:
    seen = [sample("a", 1, 10.0, 10.01), sample("b", 2, 10.02, 10.03), sample("a", 1, 10.10, 10.11)]
    assert ready_overlap_ms(seen) == pytest.approx(70.0)


def test_samples_that_may_have_been_true_one_after_the_other_are_no_overlap() -> None:
    seen = [sample("a", 1, 10.0, 10.01), sample("a", 1, 10.02, 10.5), sample("b", 2, 10.1, 10.11)]
    assert ready_overlap_ms(seen) == 0


def test_a_router_that_is_not_ready_overlaps_with_nobody() -> None:
    seen = [sample("b", 2, 10.0, 10.01), sample("a", 1, 11.0, 11.01, ready=False)]
    assert ready_overlap_ms(seen) == 0


def test_the_takeover_ends_with_the_first_admission_of_a_higher_token_after_the_kill() -> None:
    known = admissions((1, 9.0), (2, 12.0), (2, 13.0))
    first = first_admission_after(known, token=1, at=10.0)
    assert first is not None
    assert first.at == 12.0
    assert first_admission_after(known, token=2, at=10.0) is None


def test_admissions_are_read_from_canonical_lines_only(tmp_path: Path) -> None:
    log = tmp_path / "router-a.log"
    lines: list[dict[str, Any]] = [
        {"event": "request_finished", "fencing_token": 7, "admitted_at": 12.5},
        {"event": "request_finished", "fencing_token": None, "admitted_at": None, "outcome": "refused"},
        {"event": "engine_ejected", "fencing_token": 7, "admitted_at": 1.0},
    ]
    cut_off = '{"event":"request_finished","fencing_token":7,"admit'
    log.write_text("\n".join([*(json.dumps(line) for line in lines), "not json", cut_off]))
    assert read_admissions({"router-a": log}) == [Admission("router-a", 7, 12.5)]


def engine(*, ejection: dict[str, Any] | None = None, holds: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"ejection": ejection, "holds": holds or []}


def drain(age_s: float, *, reason: str = "maintenance", actor: str = "drill") -> dict[str, Any]:
    return {"kind": "operator_drain", "reason": reason, "actor": actor, "age_s": age_s}


BEFORE = {
    "prefill-2": engine(holds=[drain(2.0)]),
    "decode-2": engine(ejection={"cause": "liveness", "age_s": 1.0}),
}
CARRIED = {
    "prefill-2": engine(holds=[drain(7.1)]),
    "decode-2": engine(ejection={"cause": "liveness", "age_s": 6.0}),
}


def test_state_that_grew_older_was_carried() -> None:
    assert not_carried(BEFORE, CARRIED, elapsed_s=5.0) == []


@pytest.mark.parametrize(
    ("after", "told"),
    [
        pytest.param({**CARRIED, "prefill-2": engine()}, "operator_drain is gone", id="drain lost"),
        pytest.param({**CARRIED, "prefill-2": engine(holds=[drain(0.5)])}, "0.5 s old", id="drained anew"),
        pytest.param(
            {**CARRIED, "prefill-2": engine(holds=[drain(7.0, actor="other")])},
            "another reason or actor",
            id="other actor",
        ),
        pytest.param({**CARRIED, "decode-2": engine()}, "not any more", id="ejection lost"),
        pytest.param(
            {**CARRIED, "decode-2": engine(ejection={"cause": "liveness", "age_s": 2.0})},
            "it is a new one",
            id="ejected anew by the successor",
        ),
        pytest.param(
            {**CARRIED, "decode-2": engine(ejection={"cause": "connection", "age_s": 6.0})},
            "now for connection",
            id="ejected for something else",
        ),
        pytest.param({"prefill-2": CARRIED["prefill-2"]}, "unknown to the successor", id="engine unknown"),
    ],
)
def test_state_that_is_gone_or_new_was_not_carried(after: dict[str, dict[str, Any]], told: str) -> None:
    (lost,) = not_carried(BEFORE, after, elapsed_s=5.0)
    assert told in lost


def test_a_drill_in_which_everything_held_passes() -> None:
    document = sound().document()
    assert document["passed"] is True
    assert document["state_carried"] is True
    assert document["overlap_ms"] == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"token_after": 1}, "did not rise"),
        ({"takeover_ms": None}, "admitted nothing"),
        ({"admission_overlap_ms": 0.4}, "admitted at once"),
        ({"ready_overlap_ms": 3.0}, "admitted at once"),
        ({"failed_other": 1}, "not in flight"),
        ({"lost_state": ["prefill-2: its hold operator_drain is gone"]}, "not carried"),
    ],
)
def test_a_drill_fails_for_each_promise_that_was_broken(change: dict[str, Any], told: str) -> None:
    findings = sound()
    for name, value in change.items():
        setattr(findings, name, value)
    (problem,) = findings.problems()
    assert told in problem
    assert findings.document()["passed"] is False


def test_a_takeover_later_than_ttl_and_half_a_second_is_marked_late() -> None:
    findings = sound()
    assert findings.late is False
    findings.takeover_ms = 2501.0
    assert findings.late is True
    assert findings.document()["takeover_within_ttl_plus_500_ms"] is False


def test_a_router_that_was_not_killed_yet_is_not_certainly_dead() -> None:
    death = Death("router-a", killed_at=12.0)
    assert death.gone_at == inf
    assert death.certain_at(12.5) is False
