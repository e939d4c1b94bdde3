"""Every decision about an engine is told once: one structured log line, one counter that moves by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args

import pytest
from structlog.testing import capture_logs

from narwhal.core.events import (
    Decision,
    EngineEjected,
    EngineReadmitted,
    EvidenceCleared,
    HoldLifted,
    HoldPlaced,
    ProbeJudged,
    ProbeOrdered,
)
from narwhal.core.vocabulary import HoldKind
from narwhal.monitor.reporter import event_name
from narwhal.serving.decision_metrics import COUNTED
from tests.live.world import World, Worlds, wait_until

KINDS = {kind.__name__: kind for kind in get_args(Decision)}


def facts(decision: Decision) -> dict[str, Any]:
    return {field.name: getattr(decision, field.name) for field in fields(decision)}


def told(logs: Sequence[Any]) -> list[dict[str, Any]]:
    """The lines about decisions, without their level."""
    names = {name_of(kind) for kind in KINDS.values()}
    lines = [dict(line) for line in logs if line["event"] in names]
    for line in lines:
        assert line.pop("log_level") in ("info", "warning")
    return lines


def name_of(kind: type[Decision]) -> str:
    return event_name(object.__new__(kind))


async def live_through_everything(world: World) -> None:
    """One engine is convicted and readmitted, one refuses connections, and one is only busy, and drained."""
    await world.break_("d1", "decode:status=500")
    await world.ask_until(lambda: world["d1"].ejection is not None)
    await world.break_("p2", "refuse")
    await world.ask_until(lambda: world["p2"].ejection is not None)
    await world.heal("d1")
    await world.heal("p2")
    await wait_until(lambda: all(world.eligible(name) for name in world.engines))
    await world.break_("d2", "decode:status=429")
    await world.ask_until(lambda: world.decided(ProbeJudged, "d2"))
    await world.heal("d2")
    await world.post("/admin/engines/d2/drain", actor="op", reason="new driver")
    await world.post("/admin/engines/d2/undrain", actor="op", reason="done")
    await world.ask_often(4)


async def test_every_decision_has_exactly_one_log_line_and_moves_exactly_one_counter(worlds: Worlds) -> None:
    with capture_logs() as logs:
        world = await worlds.make()
        await live_through_everything(world)
        decisions = list(world.router.decisions)
        lines = told(logs)
        counts = {kind: await world.metric(f"{row.name}_total") for kind, row in COUNTED.items()}
    seen = {type(decision) for decision in decisions}
    expected = {EngineEjected, EngineReadmitted, EvidenceCleared, HoldLifted, HoldPlaced, ProbeJudged, ProbeOrdered}
    assert expected <= seen
    assert lines[: len(decisions)] == [{"event": event_name(decision), **facts(decision)} for decision in decisions]
    assert {k: n for k, n in counts.items() if n} == Counter(type(decision) for decision in world.router.decisions)


async def test_an_engine_is_shown_with_its_streaks_its_holds_and_what_happened_to_it(worlds: Worlds) -> None:
    world = await worlds.make()
    await world.break_("d1", 'decode:status=503,body={"error":{"message":"paused"}}')
    await world.ask_until(lambda: not world.eligible("d1"))
    await wait_until(lambda: len(world.decided(ProbeJudged, "d1")) >= 2)
    shown = await world.show("d1")
    assert shown["state"] == HoldKind.INFERENCE_VERIFICATION
    assert shown["streaks"] == {"inference_status": 3}
    assert shown["leg_streaks"] == {"inference_status/decode": 3}
    (hold,) = shown["holds"]
    assert (hold["kind"], hold["reason"]) == ("inference_verification", "inference_status")
    assert hold["age_s"] >= 0
    assert hold["inconclusive_probes"] >= 1
    (probe,) = shown["probes"]
    assert (probe["kind"], probe["cause"]) == ("inference", "inference_status")
    assert probe["running"] == (probe["next_s"] is None)
    what = [(remark["what"], remark["why"]) for remark in shown["history"]]
    assert what[0] == ("inference_verification placed", "inference_status")
    assert what[1][0] == "inference probe inconclusive"
    assert "paused" in what[1][1]
    assert len(what) <= 10


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_of_decision_has_a_line_and_a_counter_of_its_own(kind: type[Decision]) -> None:
    assert sum(name_of(other) == name_of(kind) for other in KINDS.values()) == 1
    assert sum(row.name == COUNTED[kind].name for row in COUNTED.values()) == 1
    assert set(COUNTED[kind].labels) <= {field.name for field in fields(kind)}
