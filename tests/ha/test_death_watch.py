"""Only the kernel's word proves a death: real processes that end, pause or restart, and real connections."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace

import pytest
from aiohttp import web

from narwhal.core.lease import LeaseRecord, ProcessIdentity
from narwhal.ha.death_watch import DeathWatch
from narwhal.ha.identity import boot_id, pid_namespace, start_ticks
from narwhal.serving.lifeline import Lifeline
from tests.contract.samples import candidate

SOON_S = 10.0
QUIET_S = 0.4
"""Long enough for a watch that errs to err: it looks at once, or reconnects every 0.25 s."""

ELSEWHERE = ProcessIdentity("another-host", "another-boot", "pid:[1]", 4242, 1234567)


@pytest.fixture
async def watch() -> AsyncIterator[DeathWatch]:
    made = DeathWatch(peers_direct=True)
    yield made
    await made.aclose()


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until it is ended."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield process
        process.kill()


def lease_of(pid: int) -> LeaseRecord:
    ticks = start_ticks(pid)
    assert ticks is not None
    return replace(candidate(), process=ProcessIdentity("this-host", boot_id(), pid_namespace(), pid, ticks))


async def nothing_proven(watch: DeathWatch, lease: LeaseRecord) -> bool:
    try:
        async with asyncio.timeout(QUIET_S):
            await watch.death(lease)
    except TimeoutError:
        return True
    return False


async def proof(watch: DeathWatch, lease: LeaseRecord) -> str:
    async with asyncio.timeout(SOON_S):
        return await watch.death(lease)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_process_of_this_host_that_ends_is_dead_at_once(
    watch: DeathWatch, holder: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    watching = asyncio.create_task(proof(watch, lease_of(holder.pid)))
    await asyncio.sleep(0)
    holder.send_signal(number)
    assert "on this host has ended" in await watching


async def test_a_process_that_ended_before_it_was_watched_is_dead(
    watch: DeathWatch, holder: subprocess.Popen[bytes]
) -> None:
    lease = lease_of(holder.pid)
    holder.kill()
    assert "has ended" in await proof(watch, lease), "not yet reaped"
    holder.wait()
    assert "has ended" in await proof(watch, lease)


async def test_a_pid_that_another_process_has_by_now_proves_the_death_of_the_first(watch: DeathWatch) -> None:
    lease = lease_of(os.getpid())
    former = replace(lease, process=replace(lease.process, start_ticks=lease.process.start_ticks - 1))
    assert "has ended" in await proof(watch, former)


async def test_a_process_that_is_stopped_is_not_dead(watch: DeathWatch, holder: subprocess.Popen[bytes]) -> None:
    holder.send_signal(signal.SIGSTOP)
    assert await nothing_proven(watch, lease_of(holder.pid))


@pytest.mark.parametrize(
    "change", [{"boot_id": "another"}, {"pid_namespace": "pid:[1]"}, {"pid_namespace": ""}, {"start_ticks": 0}], ids=str
)
async def test_a_pid_that_counts_somewhere_else_says_nothing(
    holder: subprocess.Popen[bytes], change: dict[str, object]
) -> None:
    lease = lease_of(holder.pid)
    holder.kill()
    holder.wait()
    elsewhere = replace(lease, process=replace(lease.process, **change))  # type: ignore[arg-type]
    assert await nothing_proven(DeathWatch(peers_direct=False), elsewhere)


class Router:
    """A listener with a lifeline, in this process: it can be cut without ending, which a real one never is."""

    def __init__(self, incarnation: str = "first") -> None:
        self.incarnation = incarnation
        self.held = asyncio.Event()
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    @property
    def lease(self) -> LeaseRecord:
        return replace(candidate(), url=f"http://127.0.0.1:{self.port}", process=ELSEWHERE)

    async def start(self) -> None:
        self.lifeline = Lifeline(router="router-a", incarnation=self.incarnation)
        self.runner = web.ServerRunner(web.Server(self._answer, handler_cancellation=True), shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert request.path == "/ha/lifeline"
        asyncio.get_running_loop().call_later(0.02, self.held.set)
        return await self.lifeline.handle(request)

    async def end(self) -> None:
        await self.runner.cleanup()


@asynccontextmanager
async def listening() -> AsyncIterator[Router]:
    router = Router()
    await router.start()
    try:
        yield router
    finally:
        await router.end()


async def test_a_cut_lifeline_and_refused_connections_are_a_proof(watch: DeathWatch) -> None:
    async with listening() as router:
        watching = asyncio.create_task(proof(watch, router.lease))
        await router.held.wait()
    assert "refuses connections" in await watching


async def test_a_cut_lifeline_alone_proves_nothing(watch: DeathWatch) -> None:
    async with listening() as router:
        watching = asyncio.create_task(nothing_proven(watch, router.lease))
        await router.held.wait()
        router.lifeline.close()
        assert await watching


async def test_refused_connections_alone_prove_nothing(watch: DeathWatch) -> None:
    """It may never have listened there: the address may be wrong, or a rule in between refuses."""
    assert await nothing_proven(watch, Router().lease)


async def test_the_lifeline_of_another_process_proves_nothing(watch: DeathWatch) -> None:
    async with listening() as router:
        router.lifeline = Lifeline(router="router-a", incarnation="second")
        watching = asyncio.create_task(nothing_proven(watch, router.lease))
        await router.held.wait()
    assert await watching


async def test_a_listener_that_hangs_proves_nothing(watch: DeathWatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        lease = replace(candidate(), url=f"http://127.0.0.1:{server.getsockname()[1]}", process=ELSEWHERE)
        assert await nothing_proven(watch, lease)


async def test_a_holder_elsewhere_is_not_called_dead_where_peers_are_not_direct() -> None:
    watch = DeathWatch(peers_direct=False)
    async with listening() as router:
        watching = asyncio.create_task(nothing_proven(watch, router.lease))
    assert await watching
    await watch.aclose()
