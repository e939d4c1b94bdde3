"""The active's handoff reaches file and mirror, only under its lease, and no version is ever used twice."""

from __future__ import annotations

import asyncio

import pytest

from narwhal.core.events import DrainOrdered
from narwhal.core.handoff import HandoffDocument
from narwhal.core.vocabulary import RouterRole
from narwhal.errors import HandoffRefused, StoreUnavailable
from tests.core.fleets import P1
from tests.ha.parts import B, document_of, make_candidate, now, with_order
from tests.monitor.parts import Monitored
from tests.virtual import virtual


async def in_file(a: Monitored) -> HandoffDocument | None:
    return await a.host.file.get()


def mirrored(a: Monitored) -> HandoffDocument | None:
    return a.shared.redis.get_handoff()


@virtual
async def test_the_control_plane_as_it_is_now_is_written_to_both_places() -> None:
    a = Monitored()
    record = await a.serve()
    a.report(DrainOrdered(P1, "op", "test"))
    await a.writer.write()
    document = mirrored(a)
    assert document is not None
    assert document == await in_file(a) == a.writer.written
    assert document.order == (record.token, 1)
    assert document.lease.incarnation == record.incarnation
    assert document.written_wall == pytest.approx(1e9, abs=1)
    assert [hold.kind for part in document.engines if part.id == P1 for hold in part.holds] == ["operator_drain"]


@virtual
async def test_versions_grow_by_one() -> None:
    a = Monitored()
    await a.serve()
    for version in (1, 2, 3):
        await a.writer.write()
        assert mirrored(a).order[1] == version  # type: ignore[union-attr]


@virtual
async def test_a_router_that_does_not_serve_writes_nothing_even_with_a_lease() -> None:
    """During a takeover its control plane may be behind the document that it would replace."""
    a = Monitored()
    await a.serve()
    a.plane.role = RouterRole.STANDBY
    assert not a.writer.may_write
    with pytest.raises(HandoffRefused, match="does not hold the lease"):
        await a.writer.write()
    assert mirrored(a) is None
    assert a.plane.version == 0


@virtual
async def test_a_router_whose_deadline_has_passed_writes_nothing() -> None:
    a = Monitored()
    await a.serve()
    a.plane.tenure.fence("test")
    with pytest.raises(HandoffRefused):
        await a.writer.write()
    assert mirrored(a) is None


@virtual
async def test_a_full_disk_fails_the_write_and_the_mirror_gets_it_all_the_same() -> None:
    a = Monitored()
    await a.serve()
    a.host.disk.full = True
    with pytest.raises(StoreUnavailable, match="no space left"):
        await a.writer.write()
    assert mirrored(a) is not None
    assert a.writer.written is None


@virtual
async def test_an_unreachable_mirror_fails_the_write_and_the_file_gets_it_all_the_same() -> None:
    a = Monitored()
    await a.serve()
    a.link.unreachable = True
    with pytest.raises(StoreUnavailable):
        await a.writer.write()
    assert await in_file(a) is not None
    assert mirrored(a) is None


@virtual
async def test_a_version_is_not_used_again_after_a_failure_whose_write_took_place() -> None:
    a = Monitored()
    await a.serve()
    a.link.lose_reply_once()
    with pytest.raises(StoreUnavailable):
        await a.writer.write()
    a.report(DrainOrdered(P1, "op", "test"))
    await a.writer.write()
    assert a.plane.version == 2
    assert mirrored(a) == a.writer.written


@virtual
async def test_the_mirror_does_not_wait_for_a_slow_disk() -> None:
    a = Monitored()
    await a.serve()
    a.host.disk.delay_s = 30
    writing = asyncio.create_task(a.writer.write())
    await asyncio.sleep(0.1)
    assert mirrored(a) is not None
    assert not writing.done()
    await writing
    assert now() == pytest.approx(30, abs=0.1)


@virtual
async def test_a_write_that_waits_for_a_slow_disk_does_not_hold_up_the_next_one_on_its_way_to_the_mirror() -> None:
    a = Monitored()
    await a.serve()
    a.host.disk.delay_s = 30
    first = asyncio.create_task(a.writer.write())
    await asyncio.sleep(1)
    a.report(DrainOrdered(P1, "op", "test"))
    second = asyncio.create_task(a.writer.write())
    await asyncio.sleep(0.1)
    document = mirrored(a)
    assert document is not None
    assert document.version == 2
    await asyncio.gather(first, second)
    assert await in_file(a) == document


@virtual
async def test_writes_at_once_arrive_in_the_order_of_their_versions() -> None:
    a = Monitored()
    await a.serve()
    await asyncio.gather(*(a.writer.write() for _ in range(10)))
    assert a.plane.version == 10
    assert mirrored(a) == await in_file(a) == a.writer.written


@pytest.mark.parametrize("cut_at_s", [0.0, 0.0005, 0.0015, 0.0025])
@virtual
async def test_a_write_that_is_cut_short_spoils_nothing_for_the_next(cut_at_s: float) -> None:
    a = Monitored()
    await a.serve()
    a.host.disk.delay_s = 0.001
    writing = asyncio.create_task(a.writer.write())
    await asyncio.sleep(cut_at_s)
    writing.cancel()
    await asyncio.wait({writing})
    await asyncio.sleep(0.01)
    await a.writer.write()
    assert mirrored(a) == await in_file(a) == a.writer.written


@virtual
async def test_a_stale_writer_is_refused_by_the_mirror() -> None:
    a = Monitored()
    record = await a.serve()
    a.shared.redis.release(record, successor=None)
    theirs = await a.shared.grant(make_candidate(B))
    newer = document_of(a.plane, theirs)
    a.shared.redis.put_handoff(newer)
    with pytest.raises(HandoffRefused):
        await a.writer.write()
    assert mirrored(a) == newer


@virtual
async def test_a_newer_document_in_the_file_is_not_overwritten() -> None:
    a = Monitored()
    record = await a.serve()
    newer = with_order(document_of(a.plane, record), record.token + 1, 1)
    await a.host.file.put(newer)
    with pytest.raises(HandoffRefused):
        await a.writer.write()
    assert await in_file(a) == newer
    assert mirrored(a) is not None


@virtual
async def test_a_router_alone_writes_its_file() -> None:
    a = Monitored()
    a.plane.tenure.solo()
    a.plane.role = RouterRole.SOLO
    a.writer._pens.pop("mirror")
    await a.writer.write()
    document = await in_file(a)
    assert document is not None
    assert (document.lease.incarnation, document.lease.token) == ("solo", 1)
