"""What a drill can prove: when each term admitted, whether two terms ever did at once, and whether state was carried.

Admissions come from the routers' own log: each `request_finished` carries its fencing token and the instant of its
admission on CLOCK_BOOTTIME, one clock for every process of a host. What a dead router could not log any more is bounded
by what its clients saw, and by its death. Source: ha.md, 3, invariants I1 and I4.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from narwhal.demo.load import Attempt, Death
from narwhal.demo.prober import Sample

AGE_SLACK_S: Final = 1.0
"""Ages are rounded, and pass through a document that is up to a monitor pass old."""


@dataclass(frozen=True, slots=True)
class Admission:
    """One request that a router admitted under `token` at `at` (lease clock, seconds)."""

    router: str
    token: int
    at: float


@dataclass(frozen=True, slots=True)
class Term:
    """The time in which one token admitted; `count` requests are known of it."""

    token: int
    router: str
    first: float
    last: float
    count: int


def read_admissions(logs: Mapping[str, Path]) -> list[Admission]:
    """Return every admission that the routers logged, in order of time. A line cut off by a kill is skipped."""
    found = []
    for router, path in logs.items():
        for line in path.read_bytes().splitlines():
            if b'"request_finished"' not in line:
                continue
            try:
                document = json.loads(line)
            except ValueError:
                continue
            at, token = document.get("admitted_at"), document.get("fencing_token")
            if at is not None and token is not None:
                found.append(Admission(router, int(token), float(at)))
    return sorted(found, key=lambda admission: admission.at)


def terms(admissions: Iterable[Admission]) -> list[Term]:
    """Return the interval of each token, in order of tokens."""
    found: dict[int, Term] = {}
    for admission in admissions:
        term = found.get(admission.token)
        if term is None:
            found[admission.token] = Term(admission.token, admission.router, admission.at, admission.at, 1)
        else:
            found[admission.token] = replace(
                term,
                first=min(term.first, admission.at),
                last=max(term.last, admission.at),
                count=term.count + 1,
            )
    return [found[token] for token in sorted(found)]


def bounded_by_death(term: Term, attempts: Iterable[Attempt], death: Death) -> Term:
    """Return the dead router's term, stretched over admissions that its clients saw and it could not log any more.

    Such an admission lies between the request's departure and its answer's first sign, and before the death.
    """
    seen = [
        min(attempt.admitted_by, death.gone_at)
        for attempt in attempts
        if attempt.router == death.router and attempt.admitted_by is not None and attempt.sent_at <= death.gone_at
    ]
    return replace(term, last=max([term.last, *seen]))


def overlap_ms(found: Sequence[Term]) -> float:
    """Return for how long two terms admitted at once, or a lower one after a higher one began, in milliseconds."""
    ordered = sorted(found, key=lambda term: term.token)
    total = 0.0
    for index, term in enumerate(ordered):
        for later in ordered[index + 1 :]:
            total += max(0.0, term.last - later.first)
    return total * 1000


def ready_overlap_ms(samples: Iterable[Sample]) -> float:
    """Return for how long two terms surely said that they are ready at once, in milliseconds.

    A sample is true somewhere between its two instants, so only what holds for every such instant counts.
    """
    sure: dict[int, Term] = {}
    for sample in samples:
        if not sample.ready or sample.token is None:
            continue
        term = sure.get(sample.token)
        if term is None:
            sure[sample.token] = Term(sample.token, sample.router, sample.received_at, sample.sent_at, 1)
        else:
            sure[sample.token] = replace(
                term,
                first=min(term.first, sample.received_at),
                last=max(term.last, sample.sent_at),
                count=term.count + 1,
            )
    return overlap_ms(list(sure.values()))


def first_admission_after(admissions: Iterable[Admission], *, token: int, at: float) -> Admission | None:
    """Return the first admission under a token above `token` that came after `at`."""
    return next((one for one in admissions if one.token > token and one.at >= at), None)


Engines = Mapping[str, Mapping[str, Any]]
"""Engines by id, as the admin port describes them."""


def not_carried(before: Engines, after: Engines, *, elapsed_s: float) -> list[str]:
    """Return what of the drains and ejections in `before` is not in `after`, `elapsed_s` later.

    They must be the same ones, grown older: an engine that the successor has ejected by itself does not count.
    """
    lost = []
    for name, was in before.items():
        now = after.get(name)
        if now is None:
            lost.append(f"{name} is unknown to the successor")
            continue
        if was["ejection"]:
            lost += [f"{name}: {why}" for why in _not_the_same_ejection(was["ejection"], now["ejection"], elapsed_s)]
        for hold in was["holds"]:
            kept = next((one for one in now["holds"] if one["kind"] == hold["kind"]), None)
            lost += [f"{name}: {why}" for why in _not_the_same_hold(hold, kept, elapsed_s)]
    return lost


def _not_the_same_ejection(was: Mapping[str, Any], now: Mapping[str, Any] | None, elapsed_s: float) -> list[str]:
    if not now:
        return ["was ejected, and is not any more"]
    if now["cause"] != was["cause"]:
        return [f"was ejected for {was['cause']}, now for {now['cause']}"]
    if now["age_s"] < was["age_s"] + elapsed_s - AGE_SLACK_S:
        return [
            f"its ejection is {now['age_s']:g} s old where {was['age_s'] + elapsed_s:.1f} s are due: it is a new one"
        ]
    return []


def _not_the_same_hold(was: Mapping[str, Any], now: Mapping[str, Any] | None, elapsed_s: float) -> list[str]:
    if now is None:
        return [f"its hold {was['kind']} is gone"]
    if (now["reason"], now["actor"]) != (was["reason"], was["actor"]):
        return [f"its hold {was['kind']} has another reason or actor"]
    if now["age_s"] < was["age_s"] + elapsed_s - AGE_SLACK_S:
        return [f"its hold {was['kind']} is {now['age_s']:g} s old where {was['age_s'] + elapsed_s:.1f} s are due"]
    return []
