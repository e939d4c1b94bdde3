"""The pair's own metrics: what is wrapped is measured, and nothing about it changes."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from narwhal.core.handoff import LeasePart
from narwhal.core.lease import Granted
from narwhal.core.vocabulary import FencingToken, PeerSign
from narwhal.errors import HandoffRefused, StoreUnavailable
from narwhal.ha.meters import HaMeters, MeteredHandoffStore, MeteredLeaseStore, MeteredPeer
from narwhal.ports import PeerLook
from narwhal.testing.memory_store import MemoryHandoffStore, MemoryLeaseStore
from tests.ha.parts import NONE, A, Shared, make_candidate, now, plane_of


class Panel:
    """The meters of one router and what a scrape would show."""

    def __init__(self) -> None:
        self.plane = plane_of()
        self.registry = CollectorRegistry()
        self.meters = HaMeters(self.plane, self.registry, clock=now)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


async def test_every_answered_store_operation_is_timed() -> None:
    panel, shared = Panel(), Shared()
    store = MeteredLeaseStore(MemoryLeaseStore(shared.link()), panel.meters)
    granted = await store.acquire(make_candidate(), floor=NONE, epoch=None)
    assert isinstance(granted, Granted)
    await store.renew(granted.record)
    await store.observe()
    await store.release(granted.record, successor=None)
    for op in ("acquire", "renew", "observe", "release"):
        assert panel.value("narwhal_redis_op_seconds_count", op=op) == 1, op


async def test_an_operation_without_an_answer_is_counted_by_its_error() -> None:
    panel, shared = Panel(), Shared()
    link = shared.link()
    link.lose_reply_once()
    store = MeteredLeaseStore(MemoryLeaseStore(link), panel.meters)
    with pytest.raises(StoreUnavailable):
        await store.observe()
    assert panel.value("narwhal_redis_op_failures_total", op="observe", error="StoreUnavailable") == 1
    assert not panel.value("narwhal_redis_op_seconds_count", op="observe")


async def test_a_handoff_write_shows_its_result_its_size_and_its_age() -> None:
    panel, shared = Panel(), Shared()
    record = await shared.grant(make_candidate())
    store = MeteredHandoffStore(MemoryHandoffStore(shared.link()), panel.meters, target="mirror")
    lease = LeasePart(router=A, incarnation=record.incarnation, token=record.token)
    document = panel.plane.capture(lease, version=2, now=now(), wall=0.0)
    await store.put(document)
    await asyncio.sleep(0.01)
    assert panel.value("narwhal_handoff_writes_total", target="mirror", result="written") == 1
    assert panel.value("narwhal_handoff_bytes") == len(document.encode())
    assert 0.005 < (panel.value("narwhal_handoff_age_seconds") or 0) < 5
    with pytest.raises(HandoffRefused):
        await store.put(document.model_copy(update={"version": 1}))
    assert panel.value("narwhal_handoff_writes_total", target="mirror", result="refused") == 1


async def test_looks_at_the_active_are_counted_by_sign() -> None:
    class Refusing:
        async def look(self, url: str, *, timeout_s: float) -> PeerLook:
            return PeerLook(PeerSign.REFUSED)

    panel = Panel()
    look = await MeteredPeer(Refusing(), panel.meters).look("http://router-b:8000", timeout_s=1)
    assert look.sign is PeerSign.REFUSED
    assert panel.value("narwhal_active_signs_total", sign="refused") == 1


async def test_the_phases_of_a_takeover_are_told_apart() -> None:
    panel = Panel()
    panel.meters.took("notice", 0.25)
    panel.meters.took("grant", 0.002)
    assert panel.value("narwhal_takeover_seconds_sum", phase="notice") == 0.25
    assert panel.value("narwhal_takeover_seconds_count", phase="grant") == 1


def test_the_lease_metrics_follow_the_tenure() -> None:
    panel = Panel()
    clock = {"now": 100.0}
    panel.registry = CollectorRegistry()
    HaMeters(panel.plane, panel.registry, clock=lambda: clock["now"])
    assert panel.value("narwhal_lease_held") == 0
    panel.plane.tenure.granted(make_candidate().with_token(FencingToken(7)), sent_at=100.0)
    assert panel.value("narwhal_lease_held") == 1
    assert panel.value("narwhal_lease_token") == 7
    assert panel.value("narwhal_lease_remaining_seconds") == pytest.approx(1.79)
    panel.plane.tenure.fence("test")
    assert panel.value("narwhal_lease_held") == 0
    assert panel.value("narwhal_fencings_total") == 1
    panel.plane.tenure.solo()
    assert panel.value("narwhal_ha_mode", mode="solo") == 1
