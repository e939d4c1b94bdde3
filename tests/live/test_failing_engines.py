"""Every way in which an engine fails: what it costs clients, how it leaves placement, and how it comes back by itself.

The fleet has two engines of each role, and requests alternate between them. So of the requests that meet the sick one
exactly `eject_after` fail, and none after them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from narwhal.core.events import EngineEjected, HoldPlaced
from narwhal.core.vocabulary import EjectionCause, FailureClass, HoldKind
from tests.live.world import IMPATIENT, Reply, World, Worlds, wait_until

EJECT_AFTER: Final = 3

CONNECTION = FailureClass.CONNECTION
STREAM = FailureClass.STREAM
STATUS = FailureClass.INFERENCE_STATUS
KV = FailureClass.KV_HANDOFF

CORE_DEAD: Final = 'status=503,body={"error":{"message":"EngineCore encountered an issue.","code":503}}'


@dataclass(frozen=True)
class Sickness:
    """An engine that fails every request, and what its clients are told: a status, or 200 and an error frame."""

    engine: str
    fault: str
    failure_class: FailureClass
    status: int
    asking: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        how = "".join(f",{name}={value}" for name, value in self.asking.items())
        return f"{self.engine}-{self.fault.partition(',body')[0]}{how}"


WHOLE: Final[dict[str, Any]] = {"stream": False}
CHAT: Final[dict[str, Any]] = {"chat": True}

AT_ONCE: Final = [
    Sickness("p1", "refuse", CONNECTION, 503),
    Sickness("d1", "refuse", CONNECTION, 502),
    Sickness("p1", "refuse=rst", CONNECTION, 502),
    Sickness("d1", "refuse=rst", CONNECTION, 502),
    Sickness("p1", "prefill:reset", CONNECTION, 502),
    Sickness("d1", "decode:reset", CONNECTION, 502),
    Sickness("d1", "decode:reset", CONNECTION, 502, WHOLE),
    Sickness("p1", "prefill:cut=0", CONNECTION, 502),
    Sickness("d1", "decode:cut=0", STREAM, 502),
    Sickness("d1", "decode:cut=3", STREAM, 200),
    Sickness("d1", "decode:cut=3", STREAM, 200, CHAT),
    Sickness("d1", "decode:cut=3", STREAM, 502, WHOLE),
    Sickness("d1", "decode:no_finish", STREAM, 200),
    Sickness("d1", "decode:no_finish=false", STREAM, 200),
    Sickness("d1", "decode:error_frame=0", STREAM, 502),
    Sickness("d1", "decode:error_frame=0", STREAM, 502, CHAT),
    Sickness("d1", "decode:error_frame=3", STREAM, 200),
    Sickness("p1", "prefill:status=500", STATUS, 502),
    Sickness("d1", "decode:status=500", STATUS, 502),
    Sickness("d1", "decode:status=500", STATUS, 502, WHOLE),
    Sickness("p1", "prefill:status=502", STATUS, 502),
    Sickness("p1", f"prefill:{CORE_DEAD}", STATUS, 502),
    Sickness("d1", f"decode:{CORE_DEAD}", STATUS, 502),
    Sickness("p1", "prefill:bad_200=error", STATUS, 502),
    Sickness("d1", "decode:bad_200=error", STATUS, 502),
    Sickness("d1", "decode:bad_200=error", STATUS, 502, WHOLE),
    Sickness("d1", "decode:bad_200=null_choices", STATUS, 502, WHOLE),
    Sickness("d1", "decode:bad_200=not_json", STATUS, 502, WHOLE),
    Sickness("d1", "decode:bad_200=empty", STATUS, 502, WHOLE),
    Sickness("d1", "decode:no_finish", STATUS, 502, WHOLE),
    Sickness("p1", "prefill:bad_ticket=null", KV, 502),
    Sickness("p1", "prefill:bad_ticket=absent", KV, 502),
    Sickness("p1", "prefill:bad_ticket=missing_key", KV, 502),
    Sickness("p1", "prefill:bad_ticket=empty_blocks", KV, 502),
    Sickness("p1", "prefill:bad_ticket=not_a_dict", KV, 502),
]

IN_TIME: Final = [
    Sickness("d1", "decode:hang", STREAM, 504),
    Sickness("d1", "decode:no_first_token", STREAM, 504),
    Sickness("d1", "decode:no_first_token", STREAM, 504, CHAT),
    Sickness("d1", "decode:no_first_token,keepalive_ms=20", STREAM, 504),
    Sickness("d1", "decode:silence=3", STREAM, 200),
]
"""Sicknesses that only a deadline brings to light."""


@pytest.mark.parametrize("sickness", AT_ONCE, ids=str)
async def test_a_failing_engine_costs_eject_after_requests_and_comes_back_when_it_is_well(
    worlds: Worlds, sickness: Sickness
) -> None:
    world = await worlds.make()
    await world.break_(sickness.engine, sickness.fault)
    replies = await world.ask_until(lambda: not world.eligible(sickness.engine), **sickness.asking)
    check_the_cost(sickness, replies)
    check_the_way_out(sickness, world)
    assert all(reply.served for reply in await world.ask_often(4, **sickness.asking))
    await check_the_way_back(sickness, world, attempts=2)


@pytest.mark.parametrize("sickness", IN_TIME, ids=str)
async def test_an_engine_that_keeps_clients_waiting_costs_eject_after_requests(
    worlds: Worlds, sickness: Sickness
) -> None:
    world = await worlds.make(IMPATIENT)
    await world.break_(sickness.engine, sickness.fault)
    replies = await world.ask_at_once(2 * EJECT_AFTER, **sickness.asking)
    check_the_cost(sickness, replies)
    check_the_way_out(sickness, world)
    await wait_until(lambda: world[sickness.engine].ejection is not None)
    assert all(reply.served for reply in await world.ask_often(4, **sickness.asking))
    await check_the_way_back(sickness, world, attempts=1)


@pytest.mark.parametrize("engine", ["p1", "d1"])
async def test_an_error_under_200_reaches_the_client_as_502_in_the_engines_words(worlds: Worlds, engine: str) -> None:
    world = await worlds.make(prefill=1, decode=1)
    await world.break_(engine, f"{world[engine].role}:bad_200=error")
    reply = await world.ask(**WHOLE)
    assert (reply.status, reply.error["code"]) == (502, "engine_failed")
    assert "The server had an error while processing your request." in reply.error["message"]
    assert world[engine].streaks.nonzero() == {STATUS}


def check_the_cost(sickness: Sickness, replies: list[Reply]) -> None:
    failed = [reply for reply in replies if not reply.served]
    assert [reply.status for reply in failed] == [sickness.status] * EJECT_AFTER
    assert all(sickness.engine in reply.error["message"] for reply in failed)
    if sickness.status == 200:
        # The error is the last thing that a broken stream says; nothing is made up that would look like an end.
        assert all("[DONE]" not in reply.frames for reply in failed)
        assert all(not choice["finish_reason"] for reply in failed for choice in reply.choices)


def check_the_way_out(sickness: Sickness, world: World) -> None:
    """The source's action for the class was taken, and nobody else was touched."""
    if sickness.failure_class is CONNECTION:
        (ejected,) = world.decided(EngineEjected, sickness.engine)
        assert (ejected.cause, ejected.streak) == (EjectionCause.CONNECTION, EJECT_AFTER)
    else:
        (held,) = world.decided(HoldPlaced, sickness.engine)
        assert (held.kind, held.reason) == (HoldKind.INFERENCE_VERIFICATION, sickness.failure_class)
    assert [name for name in world.engines if not world.eligible(name)] == [sickness.engine]


async def check_the_way_back(sickness: Sickness, world: World, *, attempts: int) -> None:
    """It is not readmitted while it is sick, and gets work again once it is well."""
    await wait_until(lambda: (out := world[sickness.engine].ejection) is not None and out.attempts >= attempts)
    assert world[sickness.engine].ejection is not None
    await world.heal(sickness.engine)
    await wait_until(lambda: world.eligible(sickness.engine))
    leg = world[sickness.engine].role
    before = world.engines[sickness.engine].state.requests[leg]
    assert all(reply.served for reply in await world.ask_often(4, **sickness.asking))
    assert world.engines[sickness.engine].state.requests[leg] == before + 2
