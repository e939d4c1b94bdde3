"""The inputs of scenario files: each row is a way of saying what happens, and what that does to the router.

What an engine did on a leg is said in the engine driver's words and classified by the driver's own tables, so that a
scenario shows the way from the wire to the decision.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from narwhal.core.events import (
    DrainCancelled,
    DrainOrdered,
    FleetEvent,
    HealthAnswered,
    HealthProbed,
    InferenceProbed,
    LegFailed,
    LegRefused,
    LegSucceeded,
    LivenessSilent,
    PairFinding,
    ReadmissionFailed,
    ReadmissionPassed,
)
from narwhal.core.faults import EngineFault, KvTicketUnreadable, PoolFull, StreamBroken
from narwhal.core.vocabulary import EngineId, HoldKind, Leg, ProbeResult, ReadmissionStep, Stage
from narwhal.engine.classify import LegKind, Mishap, fault
from narwhal.engine.http1 import Head
from narwhal.engine.wire import RawAnswer, read_document
from tests.scenarios.router import ScenarioRouter

Words = re.Match[str]
Row = tuple[str, Callable[[ScenarioRouter, Words], list[str]]]

KIND: Final = {Leg.PREFILL: LegKind.PREFILL, Leg.DECODE: LegKind.STREAM}

OTHER_FAULTS: Final[dict[str, type[EngineFault]]] = {
    "gave an unreadable ticket": KvTicketUnreadable,
    "ended without a finish reason": StreamBroken,
    "sent an error frame": StreamBroken,
    "found our own pool full": PoolFull,
}
"""What a driver finds in an answer, beside the mishaps of its connection."""


def leg(router: ScenarioRouter, words: Words) -> list[str]:
    """A leg ended. What is no evidence reaches the core as nothing at all."""
    event = leg_event(words)
    return [] if event is None else router.hear(event)


def leg_event(words: Words) -> FleetEvent | None:
    engine, of, how = EngineId(words["engine"]), Leg(words["leg"]), words["how"]
    partner = EngineId(words["partner"]) if words["partner"] else None
    if how == "succeeded":
        return LegSucceeded(engine, of, partner)
    error = read_status(engine, int(how[-3:])) if how.startswith("answered ") else fault_of(engine, of, how)
    if error is None:
        return LegRefused(engine, of)
    if error.failure_class is None:
        return None
    return LegFailed(engine, of, error.failure_class, partner, str(error))


def read_status(engine: EngineId, status: int) -> EngineFault | None:
    """Return what the driver makes of an answer of `status`, None for a refusal of the client's request."""
    try:
        read_document(RawAnswer(Head(status, {}), b'{"error": {"message": "stub"}}'), engine)
    except EngineFault as error:
        return error
    return None


def fault_of(engine: EngineId, of: Leg, how: str) -> EngineFault:
    if how in OTHER_FAULTS:
        return OTHER_FAULTS[how](f"engine {engine} {how}")
    return fault(Mishap(how), KIND[of], engine)


def findings(text: str) -> Iterator[PairFinding]:
    """Yield what an inference probe saw: `p1+d1 served, p2+d1 failed in decode, p1+d2 learnt nothing`."""
    for part in text.split(", "):
        words = re.fullmatch(r"(?P<p>\w+)\+(?P<d>\w+) (?P<how>served|learnt nothing|failed in (?P<leg>\w+))", part)
        if words is None:
            raise ValueError(f"not a finding: {part!r}")
        yield PairFinding(
            EngineId(words["p"]),
            EngineId(words["d"]),
            failed_leg=Leg(words["leg"]) if words["leg"] else None,
            conclusive=words["how"] != "learnt nothing",
            detail="" if words["how"] == "served" else part,
        )


def monitor_pass(router: ScenarioRouter, words: Words) -> list[str]:
    """One pass; stages are named that failed, with the exception's class, or that were not due."""
    results: dict[Stage, str | None] = dict.fromkeys(Stage)
    for part in (words["stages"] or "").split(", "):
        stage, _, how = part.partition(" ")
        if how == "not due":
            del results[Stage(stage)]
        elif part:
            results[Stage(stage)] = how.removeprefix("fails with ")
    return router.monitor_pass(results)


def on(make: Callable[[EngineId, Words], FleetEvent]) -> Callable[[ScenarioRouter, Words], list[str]]:
    """An input that is one event about one engine."""
    return lambda router, words: router.hear(make(EngineId(words["engine"]), words))


ACTOR = "op"
ENGINE = r"(?P<engine>[a-z]\d+)"

ROWS: Final[list[Row]] = [
    (rf"{ENGINE} (?P<leg>prefill|decode) (?P<how>.+?)(?: with (?P<partner>[a-z]\d+))?", leg),
    (rf"health of {ENGINE} answers 200", on(lambda engine, _: HealthAnswered(engine))),
    (rf"a liveness sweep gets no answer from {ENGINE}", on(lambda engine, _: LivenessSilent(engine))),
    (
        rf"health probe of {ENGINE}: (?P<result>\w+)",
        on(lambda engine, words: HealthProbed(engine, ProbeResult(words["result"]))),
    ),
    (
        rf"inference probe of {ENGINE}: (?P<findings>.+)",
        on(lambda engine, words: InferenceProbed(engine, tuple(findings(words["findings"])))),
    ),
    (rf"operator drains {ENGINE}", on(lambda engine, _: DrainOrdered(engine, ACTOR, "drain"))),
    (rf"operator undrains {ENGINE}", on(lambda engine, _: DrainCancelled(engine, ACTOR, "undrain"))),
    (rf"readmission of {ENGINE}: passed", on(lambda engine, _: ReadmissionPassed(engine, None))),
    (
        rf"readmission of {ENGINE}: stopped at (?P<step>\w+)",
        on(lambda engine, words: ReadmissionFailed(engine, ReadmissionStep(words["step"]), "it did not pass")),
    ),
    (
        rf"the controller holds {ENGINE} for drift",
        lambda router, words: router.hold(router.engine(words["engine"]), HoldKind.PERFORMANCE_DRIFT),
    ),
    (r"a pass of the monitor(?:: (?P<stages>.+))?", monitor_pass),
    (
        r"the router restarts(?P<resume> and resumes its handoff)?",
        lambda router, words: router.restart(resume=words["resume"] is not None),
    ),
    (r"a request", lambda router, _: router.request()),
    (r"ready\?", lambda router, _: router.ready()),
    (rf"state of {ENGINE}\?", lambda router, words: router.state(router.engine(words["engine"]))),
]


def answer(router: ScenarioRouter, what: str) -> list[str]:
    """Do `what` to the router and return its answer. Raises ValueError or KeyError if it means nothing."""
    for pattern, act in ROWS:
        if words := re.fullmatch(pattern, what):
            return act(router, words)
    raise ValueError("nobody knows this input")
