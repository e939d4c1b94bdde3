"""A standby has the newest handoff that fits, and says why it has not when it does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from narwhal.core.events import DrainOrdered
from narwhal.core.handoff import HandoffDocument
from narwhal.core.vocabulary import FencingToken
from narwhal.errors import HandoffRejected, StoreUnavailable
from narwhal.ha.follower import Follower
from tests.core.fleets import D1, P1
from tests.ha.parts import A, B, Host, Order, Shared, document_of, make_candidate, plane_of, renamed, with_order
from tests.virtual import virtual


class Mirror:
    """A mirror whose content the test sets at will."""

    def __init__(self) -> None:
        self.document: HandoffDocument | None = None
        self.trouble: Exception | None = None
        self.read = 0

    async def put(self, document: HandoffDocument) -> None:
        self.document = document

    async def get(self) -> HandoffDocument | None:
        self.read += 1
        await asyncio.sleep(0.001)
        if self.trouble is not None:
            raise self.trouble
        return self.document

    @property
    def order(self) -> Order | None:
        return self.document.order if self.document is not None else None


class Following:
    """Router B, which follows router A."""

    def __init__(self) -> None:
        self.mirror = Mirror()
        self.host = Host()
        self.plane = plane_of(B)
        self.follower = Follower(self.plane, file=self.host.file, mirror=self.mirror)
        self.active = plane_of(A)

    def write(self, token: int, version: int, *, drain: bool = False) -> HandoffDocument:
        """Let the active write a document of this order."""
        if drain:
            self.active.apply(DrainOrdered(P1, "op", "test"), now=0.0)
        self.mirror.document = with_order(document_of(self.active, make_candidate(A)), token, version)
        return self.mirror.document

    async def look(self) -> None:
        await self.follower.catch_up(self.mirror.order)

    @property
    def p1_is_drained(self) -> bool:
        return self.plane.fleet.engines[P1].drained

    @asynccontextmanager
    async def copying(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.follower.keep_copies())
        yield
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@virtual
async def test_the_first_document_is_applied() -> None:
    b = Following()
    b.write(5, 1, drain=True)
    await b.look()
    assert b.p1_is_drained
    assert b.follower.applied == (5, 1)
    assert b.plane.version == 1


@virtual
async def test_an_empty_mirror_changes_nothing() -> None:
    b = Following()
    await b.look()
    assert (b.follower.applied, b.follower.rejected, b.mirror.read) == (None, None, 0)


@pytest.mark.parametrize("order", [(5, 3), (6, 1), (2**53, 1)], ids=str)
@virtual
async def test_a_newer_document_replaces_what_is_in_force(order: Order) -> None:
    b = Following()
    b.write(5, 2)
    await b.look()
    b.write(*order, drain=True)
    await b.look()
    assert b.p1_is_drained
    assert b.follower.applied == order


@pytest.mark.parametrize("order", [(5, 2), (5, 1), (4, 99)], ids=str)
@virtual
async def test_an_older_document_is_not_even_read(order: Order) -> None:
    b = Following()
    b.write(5, 2)
    await b.look()
    b.write(*order, drain=True)
    await b.look()
    assert not b.p1_is_drained
    assert b.follower.applied == (5, 2)
    assert b.mirror.read == 1


@virtual
async def test_a_document_that_is_older_than_was_announced_is_not_applied() -> None:
    """The data went back between the two looks."""
    b = Following()
    b.write(5, 2)
    await b.look()
    b.write(5, 1, drain=True)
    await b.follower.catch_up((FencingToken(5), 3))
    assert not b.p1_is_drained
    assert b.follower.applied == (5, 2)


@virtual
async def test_a_document_that_was_lost_between_the_two_looks_changes_nothing() -> None:
    b = Following()
    await b.follower.catch_up((FencingToken(5), 3))
    assert (b.follower.applied, b.follower.rejected) == (None, None)


@virtual
async def test_versions_never_go_back_over_a_fresh_active() -> None:
    """A document of a newer term may have a lower version; the writer here continues above both."""
    b = Following()
    b.write(5, 90)
    await b.look()
    b.write(6, 1)
    await b.look()
    assert b.follower.applied == (6, 1)
    assert b.plane.version == 90


@virtual
async def test_a_document_of_another_engine_set_is_rejected_by_name_and_not_applied() -> None:
    b = Following()
    b.mirror.document = renamed(b.write(5, 1, drain=True), "d1", "d9")
    await b.look()
    assert not b.p1_is_drained
    assert b.follower.applied is None
    assert b.follower.rejected is not None
    assert "engines.d9" in b.follower.rejected
    assert f"engines.{D1}" in b.follower.rejected


@virtual
async def test_a_torn_document_is_rejected_with_the_reason() -> None:
    b = Following()
    b.write(5, 1)
    b.mirror.trouble = HandoffRejected(["(document): Invalid JSON"])
    await b.look()
    assert b.follower.rejected == "handoff rejected: (document): Invalid JSON"


@virtual
async def test_a_rejected_document_is_read_and_logged_once() -> None:
    b = Following()
    b.mirror.document = renamed(b.write(5, 1), "d1", "d9")
    with capture_logs() as logs:
        for _ in range(20):
            await b.look()
    assert b.mirror.read == 1
    assert [line["event"] for line in logs] == ["handoff_rejected"]


@virtual
async def test_a_fitting_newer_document_ends_the_rejection() -> None:
    b = Following()
    b.mirror.document = renamed(b.write(5, 1), "d1", "d9")
    await b.look()
    b.write(5, 2, drain=True)
    await b.look()
    assert b.follower.rejected is None
    assert b.p1_is_drained


@virtual
async def test_a_rejected_document_that_is_gone_no_longer_counts() -> None:
    b = Following()
    b.mirror.document = renamed(b.write(5, 1), "d1", "d9")
    await b.look()
    b.mirror.document = None
    await b.look()
    assert b.follower.rejected is None


@virtual
async def test_another_unfit_document_is_rejected_for_its_own_reason() -> None:
    b = Following()
    b.mirror.document = renamed(b.write(5, 1), "d1", "d9")
    await b.look()
    b.mirror.document = renamed(b.write(5, 2), "p1", "p9")
    await b.look()
    assert b.follower.rejected is not None
    assert "engines.p9" in b.follower.rejected
    assert "engines.d9" not in b.follower.rejected


@virtual
async def test_a_mirror_that_gives_no_answer_raises_and_changes_nothing() -> None:
    b = Following()
    b.write(5, 1, drain=True)
    b.mirror.trouble = StoreUnavailable("no answer")
    with pytest.raises(StoreUnavailable):
        await b.look()
    assert (b.follower.applied, b.follower.rejected) == (None, None)
    b.mirror.trouble = None
    await b.look()
    assert b.p1_is_drained


@virtual
async def test_a_document_that_is_the_reader_s_own_from_before_is_applied_like_any_other() -> None:
    b = Following()
    document = document_of(b.active, make_candidate(B), version=4)
    b.mirror.document = with_order(document, 5, 4)
    await b.look()
    assert b.follower.applied == (5, 4)


@virtual
async def test_resume_applies_the_local_file() -> None:
    b = Following()
    await b.host.file.put(b.write(5, 1, drain=True))
    await b.follower.resume_from_file()
    assert b.p1_is_drained
    assert b.follower.applied == (5, 1)
    assert await b.follower.token_on_file() == 5


@virtual
async def test_resume_without_a_file_starts_afresh() -> None:
    b = Following()
    await b.follower.resume_from_file()
    assert (b.follower.applied, b.follower.rejected) == (None, None)
    assert await b.follower.token_on_file() == 0


@pytest.mark.parametrize(("in_file", "mirrored", "applied"), [((5, 9), (6, 1), (6, 1)), ((6, 2), (6, 1), (6, 2))])
@pytest.mark.parametrize("file_first", [True, False])
@virtual
async def test_the_newer_of_file_and_mirror_wins(
    in_file: Order, mirrored: Order, applied: Order, file_first: bool
) -> None:
    b = Following()
    await b.host.file.put(b.write(*in_file))
    b.write(*mirrored)
    steps = [b.follower.resume_from_file, b.look]
    for step in steps if file_first else reversed(steps):
        await step()
    assert b.follower.applied == applied


@virtual
async def test_a_torn_file_is_rejected_with_the_reason() -> None:
    b = Following()
    await b.host.file.put(b.write(5, 1))
    b.host.disk.torn = True
    await b.follower.resume_from_file()
    assert b.follower.rejected is not None
    assert b.follower.rejected.startswith("local file: handoff rejected:")
    assert await b.follower.token_on_file() == 0


@virtual
async def test_a_file_of_another_engine_set_is_rejected_and_its_token_still_counts() -> None:
    b = Following()
    await b.host.file.put(renamed(b.write(5, 1, drain=True), "d1", "d9"))
    await b.follower.resume_from_file()
    assert b.follower.rejected is not None
    assert "local file: engines." in b.follower.rejected
    assert not b.p1_is_drained
    assert await b.follower.token_on_file() == 5


@virtual
async def test_an_empty_mirror_does_not_excuse_a_file_that_was_rejected() -> None:
    b = Following()
    await b.host.file.put(renamed(b.write(5, 1), "d1", "d9"))
    b.mirror.document = None
    await b.follower.resume_from_file()
    await b.look()
    assert b.follower.rejected is not None


@virtual
async def test_a_fitting_mirrored_document_excuses_a_rejected_file() -> None:
    b = Following()
    await b.host.file.put(renamed(b.write(5, 1), "d1", "d9"))
    await b.follower.resume_from_file()
    b.write(5, 2)
    await b.look()
    assert b.follower.rejected is None


@virtual
async def test_an_applied_document_is_copied_to_the_local_file() -> None:
    b = Following()
    async with b.copying():
        document = b.write(5, 1, drain=True)
        await b.look()
        await asyncio.sleep(0.01)
        assert await b.host.file.get() == document


@virtual
async def test_a_slow_disk_delays_no_look_and_gets_the_newest_at_last() -> None:
    b = Following()
    b.host.disk.delay_s = 3.0
    loop = asyncio.get_running_loop()
    async with b.copying():
        for version in range(1, 11):
            b.write(5, version)
            began = loop.time()
            await b.look()
            assert loop.time() - began < 0.1
            await asyncio.sleep(0.1)
        await asyncio.sleep(10)
        assert (await b.host.file.get()) == b.mirror.document
    assert b.host.disk.written < 5


@virtual
async def test_a_full_disk_is_logged_and_the_copy_is_tried_with_the_next_document() -> None:
    b = Following()
    b.host.disk.full = True
    with capture_logs() as logs:
        async with b.copying():
            b.write(5, 1)
            await b.look()
            await asyncio.sleep(0.01)
            assert [line["event"] for line in logs] == ["handoff_copy_failed"]
            b.host.disk.full = False
            document = b.write(5, 2)
            await b.look()
            await asyncio.sleep(0.01)
            assert await b.host.file.get() == document


@virtual
async def test_a_newer_local_file_is_left_alone() -> None:
    b = Following()
    newer = with_order(b.write(6, 3), 6, 3)
    await b.host.file.put(newer)
    async with b.copying():
        b.write(5, 1)
        await b.look()
        await asyncio.sleep(0.01)
        assert await b.host.file.get() == newer


@virtual
async def test_the_real_mirror_is_followed_version_by_version() -> None:
    shared = Shared()
    record = await shared.grant(make_candidate(A))
    active, standby = plane_of(A), plane_of(B)
    follower = Follower(standby, file=Host().file, mirror=shared.mirror())
    for version in (1, 2, 5):
        await shared.mirror().put(document_of(active, record, version=version))
        await follower.catch_up(shared.redis.observe().handoff)
        assert follower.applied == (record.token, version)
