"""kill-active signals the process that the lease names and no other, and reports who follows."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from narwhal.core.lease import Granted, LeaseRecord, ProcessIdentity
from narwhal.core.vocabulary import FencingToken, PeerSign, RouterId
from narwhal.ha.identity import boot_id, start_ticks
from narwhal.ha.kill import HolderElsewhere, HolderUnknown, NobodyHolds, active_process, await_successor
from narwhal.ports import LeaseStore, PeerLook
from narwhal.testing.memory_store import MemoryLeaseStore, MemoryLink, MemoryRedis
from tests.contract.samples import candidate, granted


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until it is ended."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield process
        process.kill()


def held_by(pid: int, *, router: str = "router-a") -> LeaseRecord:
    ticks = start_ticks(pid)
    assert ticks is not None
    return replace(candidate(router), process=ProcessIdentity("this-host", boot_id(), "", pid, ticks))


async def taken_over(store: LeaseStore, record: LeaseRecord) -> LeaseRecord:
    """Acquire in a store that has been used before."""
    answer = await store.acquire(record, floor=FencingToken(0), epoch=(await store.observe()).epoch)
    assert isinstance(answer, Granted), answer
    return answer.record


class ScriptedPeer:
    """A /ready that says these signs one after the other, the last one for ever."""

    def __init__(self, *signs: PeerSign) -> None:
        self._signs = list(signs)

    async def look(self, url: str, *, timeout_s: float) -> PeerLook:
        return PeerLook(self._signs.pop(0) if len(self._signs) > 1 else self._signs[0])


def test_the_named_process_gets_the_signal(bystander: subprocess.Popen[bytes]) -> None:
    with active_process(held_by(bystander.pid), lease_left_ms=900) as holder:
        assert holder.pid == bystander.pid
        holder.send(signal.SIGKILL)
    assert bystander.wait(timeout=10) == -signal.SIGKILL


@pytest.mark.parametrize(
    "change",
    [lambda one: replace(one, start_ticks=1), lambda one: replace(one, pid=1)],
    ids=["another start time", "another pid"],
)
def test_a_process_that_is_not_the_named_one_is_never_given(
    bystander: subprocess.Popen[bytes], change: Callable[[ProcessIdentity], ProcessIdentity]
) -> None:
    record = held_by(bystander.pid)
    stranger = replace(record, process=change(record.process))
    with pytest.raises(HolderUnknown, match="Nothing was signalled"), active_process(stranger, lease_left_ms=900):
        pass
    assert bystander.poll() is None


def test_a_process_that_has_ended_is_not_given(bystander: subprocess.Popen[bytes]) -> None:
    record = held_by(bystander.pid)
    bystander.kill()
    bystander.wait(timeout=10)
    with pytest.raises(HolderUnknown), active_process(record, lease_left_ms=900):
        pass


def test_a_process_that_ends_between_check_and_signal_is_said_to(bystander: subprocess.Popen[bytes]) -> None:
    with active_process(held_by(bystander.pid), lease_left_ms=900) as holder:
        bystander.kill()
        bystander.wait(timeout=10)
        with pytest.raises(HolderUnknown, match="ended by itself"):
            holder.send(signal.SIGKILL)


@pytest.mark.parametrize("boot", ["", "0d0c8f7e-other-boot"], ids=["no boot id", "another boot"])
def test_a_holder_on_another_host_is_named_with_its_host(bystander: subprocess.Popen[bytes], boot: str) -> None:
    record = held_by(bystander.pid)
    far = replace(record, process=replace(record.process, boot_id=boot, host="far-away"))
    with pytest.raises(HolderElsewhere, match="far-away"), active_process(far, lease_left_ms=900):
        pass
    assert bystander.poll() is None


def test_a_free_lease_names_nobody() -> None:
    with pytest.raises(NobodyHolds), active_process(None, lease_left_ms=0):
        pass


async def test_the_successor_is_reported_with_both_gaps() -> None:
    store = MemoryLeaseStore(MemoryLink(MemoryRedis()))
    before = await granted(store, candidate("router-a"))
    since = asyncio.get_running_loop().time()
    await store.release(before, successor=RouterId("router-b"))
    after = await taken_over(store, candidate("router-b"))
    peer = ScriptedPeer(PeerSign.REFUSED, PeerSign.FENCED, PeerSign.READY)
    successor = await await_successor(store, peer, before.token, since=since, timeout_s=5)
    assert successor is not None
    assert (successor.router, successor.token) == ("router-b", after.token)
    assert successor.ready_ms is not None
    assert 0 <= successor.lease_ms <= successor.ready_ms


async def test_the_same_token_is_no_successor() -> None:
    store = MemoryLeaseStore(MemoryLink(MemoryRedis()))
    before = await granted(store, candidate("router-a"))
    since = asyncio.get_running_loop().time()
    successor = await await_successor(store, ScriptedPeer(PeerSign.READY), before.token, since=since, timeout_s=0.1)
    assert successor is None


async def test_a_successor_that_cannot_be_reached_is_reported_without_ready() -> None:
    store = MemoryLeaseStore(MemoryLink(MemoryRedis()))
    after = await granted(store, candidate("router-b"))
    since = asyncio.get_running_loop().time()
    peer = ScriptedPeer(PeerSign.REFUSED)
    successor = await await_successor(store, peer, FencingToken(after.token - 1), since=since, timeout_s=0.2)
    assert successor is not None
    assert successor.ready_ms is None
