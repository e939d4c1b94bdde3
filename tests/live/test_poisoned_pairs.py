"""Failures that name a pair: decode legs that fail where the prefill, its tickets or the link between two is sick."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import pytest

from narwhal.core.events import EngineEjected, HoldPlaced, PairParted, PairRejoined, ProbeJudged
from narwhal.core.placement import missing_roles
from narwhal.core.vocabulary import EjectionCause, HoldKind, ProbeKind, ProbeResult
from narwhal.testing.stub_engine import StubEngine, StubSettings
from narwhal.testing.stub_engine.bodies import Prompt
from narwhal.testing.stub_engine.tickets import Fetched, KvFetcher, KvOutcome
from tests.live.world import Reply, World, Worlds, wait_until

STALE: Final = "prefill:stale_ticket"
"""Tickets of a process that is gone: every decode engine that is given one fails."""


def failed(replies: list[Reply]) -> list[Reply]:
    return [reply for reply in replies if not reply.served]


class BadLink(KvFetcher):
    """Cannot fetch KV from one prefill engine."""

    def __init__(self, fetcher: KvFetcher, broken_from: str) -> None:
        self._fetcher = fetcher
        self.broken_from: str | None = broken_from

    async def fetch(self, params: Mapping[str, Any], prompt: Prompt) -> Fetched:
        if params["stub_url"] == self.broken_from:
            return Fetched(KvOutcome.UNREACHABLE)
        return await self._fetcher.fetch(params, prompt)

    async def close(self) -> None:
        await self._fetcher.close()


class LinkedEngine(StubEngine):
    """An engine whose link to another one can be broken."""

    link: BadLink | None = None

    def cut_off(self, prefill: StubEngine) -> None:
        self.link = BadLink(super().fetcher, prefill.url)

    @property
    def fetcher(self) -> KvFetcher:
        return self.link or super().fetcher


async def cut_off(world: World, decode: str, prefill: str) -> BadLink:
    engine = world.engines[decode]
    assert isinstance(engine, LinkedEngine)
    engine.cut_off(world.engines[prefill])
    assert engine.link is not None
    return engine.link


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_prefill_whose_tickets_fail_everywhere_is_ejected_and_no_decode_engine_is(
    worlds: Worlds, stream: bool
) -> None:
    world = await worlds.make()
    await world.break_("p1", STALE)
    replies = await world.ask_until(lambda: world["p1"].ejection is not None, stream=stream)
    assert len(failed(replies)) <= 4
    (ejected,) = world.decided(EngineEjected)
    assert (ejected.engine, ejected.cause) == ("p1", EjectionCause.INFERENCE_PROBE)
    await wait_until(lambda: world.eligible("d1") and world.eligible("d2"))
    assert not failed(await world.ask_often(6, stream=stream))
    await world.heal("p1")
    await wait_until(lambda: world.eligible("p1"))
    assert not failed(await world.ask_often(6, stream=stream))


async def test_a_prefill_that_poisons_the_only_decode_engine_is_found_among_prefills_that_do_not(
    worlds: Worlds,
) -> None:
    """The decode engine fails every other request and never three in a row."""
    world = await worlds.make(decode=1)
    await world.break_("p1", STALE)
    replies = await world.ask_until(lambda: not world.eligible("p1"))
    assert len(failed(replies)) == 3
    assert not failed(await world.ask_often(6))
    await wait_until(lambda: len(world.decided(ProbeJudged, "p1")) >= 2)
    assert {probe.result for probe in world.decided(ProbeJudged, "p1")} == {ProbeResult.INCONCLUSIVE}
    assert not world.decided(HoldPlaced, "d1")
    await world.heal("p1")
    await wait_until(lambda: world.eligible("p1"))
    assert not failed(await world.ask_often(6))


async def test_a_fleet_whose_prefills_are_all_poisoned_says_so_and_returns_with_their_restart(worlds: Worlds) -> None:
    """Killed decode engines can leave every prefill poisoned: all engines are healthy, and nothing works."""
    world = await worlds.make()
    await world.break_("p1", STALE)
    await world.break_("p2", STALE)
    replies = await world.ask_until(lambda: not capacity(world))
    assert {reply.error["code"] for reply in replies} == {"stream_broken"}
    assert len(replies) <= 8
    status, document = await world.ready()
    assert (status, document["control_ready"]) == (503, True)
    assert document["reason"].startswith("no eligible")
    refused = await world.ask()
    assert (refused.status, refused.error["code"]) == (503, "no_capacity")
    assert refused.headers["X-Narwhal-Not-Executed"] == "1"
    for name in ("p1", "p2"):
        await world.heal(name)
        before = world[name].generation
        await world.engines[name].restart_generation()
        await until_replaced(world, name, before)
    await wait_until(lambda: all(world.eligible(name) for name in world.engines))
    assert not failed(await world.ask_often(6))


async def until_replaced(world: World, engine: str, generation: object) -> None:
    """The router knows that another process answers at the engine's address."""
    await wait_until(lambda: world[engine].generation not in (None, generation))


def capacity(world: World) -> bool:
    return not missing_roles(world.plane.fleet, now=asyncio.get_running_loop().time())


@pytest.mark.parametrize("traffic", ["in turn", "at once"])
async def test_two_engines_that_only_fail_together_are_kept_apart_until_they_work(worlds: Worlds, traffic: str) -> None:
    world = await worlds.make(stub_kind=LinkedEngine)
    link = await cut_off(world, "d1", "p1")
    replies: list[Reply] = []
    while not world.decided(PairParted):
        replies += await (world.ask_often(3) if traffic == "in turn" else world.ask_at_once(4))
    assert len(failed(replies)) <= 6
    (parted,) = world.decided(PairParted)
    assert (parted.prefill, parted.decode) == ("p1", "d1")
    await wait_until(lambda: all(world.eligible(name) for name in world.engines))
    assert not failed(await world.ask_often(8))
    assert not failed(await world.ask_at_once(8))
    assert world.engines["d1"].state.requests["decode"] > 3
    assert not world.decided(EngineEjected)
    await wait_until(lambda: len(world.decided(PairParted)) >= 3)
    assert (await world.show("d1"))["apart_from"][0]["engine"] == "p1"
    link.broken_from = None
    await wait_until(lambda: world.decided(PairRejoined))
    assert not failed(await world.ask_often(8))
    assert (await world.show("d1"))["apart_from"] == []


async def test_a_decode_engine_that_fails_with_every_prefill_is_ejected_and_no_prefill_is(worlds: Worlds) -> None:
    """Its prefill legs succeed all the while: a success of one leg says nothing of the other."""
    world = await worlds.make()
    await world.break_("d1", "decode:error_frame=0")
    replies = await world.ask_until(lambda: world["d1"].ejection is not None)
    assert 3 <= len(failed(replies)) <= 4
    (ejected,) = world.decided(EngineEjected)
    assert (ejected.engine, ejected.cause) == ("d1", EjectionCause.INFERENCE_PROBE)
    assert {hold.kind for hold in world.decided(HoldPlaced)} == {HoldKind.INFERENCE_VERIFICATION}
    assert {probe.kind for probe in world.decided(ProbeJudged)} == {ProbeKind.INFERENCE}
    assert not failed(await world.ask_often(6))


def test_the_broken_link_is_a_stub_engine_like_any_other() -> None:
    assert LinkedEngine(StubSettings(role="decode")).link is None
