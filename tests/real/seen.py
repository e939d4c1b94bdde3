"""What a pair in front of real engines shows of itself: states, log lines, and whether it serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from tests.real.clients import Watched
from tests.real.engines import KV_RECEIVED, RealEngine
from tests.real.routers import Router, eventually

FULL: Final = 3
"""`recovery.eject_after`: so many failures in a row fill a streak."""
NOTICED_S: Final = 120.0
BACK_S: Final = 180.0
"""Generous: two cores carry the engines, the routers and whatever else runs."""


def per_decode(engines: Sequence[RealEngine], each: int) -> int:
    return each * sum(engine.role == "decode" for engine in engines)


def finished(router: Router) -> dict[str, dict[str, Any]]:
    """The router's last line about each request, by its id."""
    return {line["request_id"]: line for line in router.said("request_finished")}


def told(router: Router, engine: str) -> list[str]:
    """What the router's log says became of an engine, in order."""
    words: dict[str, Callable[[dict[str, Any]], str]] = {
        "hold_placed": lambda line: f"{line['kind']} ({line['reason']})",
        "hold_lifted": lambda line: f"lifted: {line['reason']}",
        "probe_judged": lambda line: f"{line['kind']} probe {line['result']}",
        "engine_ejected": lambda line: f"ejected: {line['cause']}",
        "engine_readmitted": lambda line: "readmitted",
    }
    return [
        words[line["event"]](line) for line in router.log if line.get("event") in words and line["engine"] == engine
    ]


async def becomes(router: Router, engine: RealEngine, state: str, *, within_s: float = NOTICED_S) -> None:
    async def is_so() -> bool:
        return await router.state(engine.name) == state

    await eventually(is_so, within_s=within_s, what=f"{engine.name} is {state}: {router.child.log}")


async def readmitted(router: Router, engine: RealEngine) -> None:
    """Return when an engine was out and is in placement again, which nobody but the router brought about."""

    async def is_so() -> bool:
        return "readmitted" in told(router, engine.name) and await router.state(engine.name) == "eligible"

    await eventually(is_so, within_s=BACK_S, what=f"{engine.name} is readmitted: {router.child.log}")


async def serves_with_kv(router: Router, engines: Sequence[RealEngine]) -> None:
    """Hold that a request is served now, and that its KV came over."""
    before = sum([await engine.metric(KV_RECEIVED) for engine in engines if engine.role == "decode"])
    one = Watched()
    async with router.client() as client:
        await one.run(client, tokens=8)
    assert one.whole, one.error
    after = sum([await engine.metric(KV_RECEIVED) for engine in engines if engine.role == "decode"])
    assert after - before >= one.usage.prompt_tokens
