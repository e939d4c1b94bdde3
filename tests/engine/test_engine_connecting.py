"""Connections: those that this host cannot open, and those that have rested too long to be trusted."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from narwhal.core.faults import EngineUnreachable, PoolFull
from narwhal.engine import caller
from narwhal.engine.client import EngineClient
from narwhal.ports import ConnectRefused, WholeAnswer
from tests.engine.legs import PREFILLED, at, call, ticket
from tests.engine.scripted import Peer, scripted


class Failing:
    """The running loop, except that every attempt to connect fails as the kernel would let it."""

    def __init__(self, number: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    async def create_connection(self, *_: Any, **__: Any) -> Any:
        raise OSError(self._number, "test")


def fail_to_connect(engines: EngineClient, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for pool in engines._pools:
        monkeypatch.setattr(pool, "_loop", Failing(number))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL])
async def test_a_host_without_room_for_a_connection_accuses_no_engine(
    engines: EngineClient, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail_to_connect(engines, monkeypatch, number)
    with engines.data.reserve() as legs, pytest.raises(PoolFull) as full:
        await legs.prefill(at("http://127.0.0.1:1"), call(), timeout_s=2)
    assert full.value.failure_class is None
    health = await engines.control.health(at("http://127.0.0.1:1"), timeout_s=2)
    assert (health.healthy, health.conclusive) == (False, False)
    finding = await engines.control.infer(at("http://127.0.0.1:1"), at("http://127.0.0.1:1"), model="m", timeout_s=2)
    assert (finding.failed_leg, finding.conclusive) == (None, False)


@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET])
async def test_an_engine_that_cannot_be_reached_is_accused(
    engines: EngineClient, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail_to_connect(engines, monkeypatch, number)
    with engines.data.reserve() as legs, pytest.raises(ConnectRefused):
        await legs.prefill(at("http://127.0.0.1:1"), call(), timeout_s=2)


async def tires(peer: Peer) -> None:
    """Answers the first request of a connection and resets it with the second."""
    await peer.request()
    await peer.answer(PREFILLED)
    await peer.request()
    peer.reset()


@pytest.mark.parametrize(("rested_s_max", "served"), [(0.02, True), (60.0, False)])
async def test_a_decode_takes_no_connection_that_has_rested(
    engines: EngineClient, monkeypatch: pytest.MonkeyPatch, rested_s_max: float, served: bool
) -> None:
    """The engine may close it at that very moment, and the ticket cannot be used again."""
    monkeypatch.setattr(caller, "RESTED_S_MAX", rested_s_max)
    loop = asyncio.get_running_loop()
    async with scripted(tires) as server:
        with engines.data.reserve() as legs:
            await legs.prefill(at(server.url), call(), timeout_s=2)
            rested_at = loop.time() + 0.05
            while loop.time() < rested_at:
                await asyncio.sleep(0.01)
            if served:
                assert isinstance(await legs.decode(at(server.url), call(), ticket()), WholeAnswer)
            else:
                with pytest.raises(EngineUnreachable):
                    await legs.decode(at(server.url), call(), ticket())
        assert server.accepted == 1 + served
