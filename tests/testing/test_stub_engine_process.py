"""`narwhal stub-engine` as a process: it says where it listens, obeys its flags, and ends as engines end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.testing.wire import COMPLETION, WANT_TICKET


@dataclass
class Process:
    """A running stub engine and the line that it printed."""

    child: asyncio.subprocess.Process
    ready: dict[str, Any]

    async def ended(self) -> tuple[int, str]:
        """Wait for its end and return exit code and standard error."""
        async with asyncio.timeout(10):
            _, errors = await self.child.communicate()
        assert self.child.returncode is not None
        return self.child.returncode, errors.decode()


Launch = Callable[..., Awaitable[Process]]


async def _spawn(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "narwhal", "stub-engine", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture
async def launch() -> AsyncIterator[Launch]:
    """Return a function that starts a stub engine and waits until it listens; all are ended after the test."""
    children: list[asyncio.subprocess.Process] = []

    async def start(role: str, *flags: str) -> Process:
        child = await _spawn("--role", role, "--port", "0", *flags)
        children.append(child)
        assert child.stdout is not None
        async with asyncio.timeout(20):
            return Process(child, json.loads(await child.stdout.readline()))

    yield start
    for child in children:
        if child.returncode is None:
            child.kill()
            await child.communicate()


async def _post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with http.post(url + "/v1/completions", json=body) as answer:
        return answer.status, await answer.json()


async def test_a_pair_of_processes_passes_kv_and_survives_a_restart_of_one(
    http: aiohttp.ClientSession, launch: Launch
) -> None:
    prefill, decode = await launch("prefill", "--model", "m"), await launch("decode", "--model", "m", "--itl", "1")
    assert (prefill.ready["event"], prefill.ready["role"]) == ("stub_engine_started", "prefill")
    assert prefill.ready["pid"] == prefill.child.pid
    leg = {**COMPLETION, "model": "m", "max_tokens": 1, "kv_transfer_params": WANT_TICKET}
    tickets = [(await _post(http, prefill.ready["url"], leg))[1]["kv_transfer_params"] for _ in range(2)]
    assert tickets[0]["remote_engine_id"] == prefill.ready["engine_id"]
    status, _ = await _post(http, decode.ready["url"], {**COMPLETION, "kv_transfer_params": tickets[0]})
    assert status == 200
    prefill.child.kill()
    await prefill.ended()
    status, _ = await _post(http, decode.ready["url"], {**COMPLETION, "kv_transfer_params": tickets[1]})
    assert status == 500
    async with http.get(decode.ready["admin_url"] + "/stub/state") as answer:
        counters = (await answer.json())["counters"]
    assert (counters["tickets_consumed"], counters["kv_load_failures"]) == (1, 1)


async def test_faults_from_the_command_line_are_in_force_and_heal_over_the_admin_port(
    http: aiohttp.ClientSession, launch: Launch
) -> None:
    engine = await launch("decode", "--fault", "refuse", "--fault", "health:status=503")
    with pytest.raises(aiohttp.ClientConnectorError):
        await _post(http, engine.ready["url"], COMPLETION)
    async with http.delete(engine.ready["admin_url"] + "/stub/faults") as answer:
        assert answer.status == 200
    assert (await _post(http, engine.ready["url"], COMPLETION))[0] == 200


async def _exchange(port: int | None, request: bytes) -> bytes:
    """Return the answer to `request`; a reset may come as early as in the middle of connecting."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()


async def test_connections_are_reset_under_the_loop_of_the_process_too(launch: Launch) -> None:
    engine = await launch("decode", "--fault", "refuse=rst,times=1", "--fault", "info:reset")
    for request in (b"", b"GET /version HTTP/1.1\r\nHost: stub\r\n\r\n"):
        with pytest.raises(ConnectionResetError):
            await _exchange(urlsplit(engine.ready["url"]).port, request)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_at_once_with_streams_running(
    http: aiohttp.ClientSession, launch: Launch, number: signal.Signals
) -> None:
    engine = await launch("decode", "--itl", "50")
    body = {**COMPLETION, "max_tokens": 1000, "stream": True}
    async with http.post(engine.ready["url"] + "/v1/completions", json=body) as answer:
        await answer.content.readline()
        engine.child.send_signal(number)
        assert await engine.ended() == (0, "")


async def test_under_strict_death_a_malformed_ticket_ends_the_process(
    http: aiohttp.ClientSession, launch: Launch
) -> None:
    engine = await launch("decode", "--strict-death")
    status, _ = await _post(
        http, engine.ready["url"], {**COMPLETION, "kv_transfer_params": {"do_remote_prefill": True}}
    )
    assert status == 500
    code, errors = await engine.ended()
    assert code == 1
    assert "died of a malformed KV ticket" in errors


async def test_a_bad_fault_ends_it_with_one_line_and_code_2() -> None:
    child = await _spawn("--role", "decode", "--port", "0", "--fault", "decode:explode")
    _, errors = await child.communicate()
    assert child.returncode == 2
    assert "unknown kind 'explode'" in errors.decode()
    assert "Traceback" not in errors.decode()


async def test_a_taken_port_ends_it_with_one_line_and_code_1(launch: Launch) -> None:
    engine = await launch("decode")
    port = engine.ready["url"].rpartition(":")[2]
    child = await _spawn("--role", "decode", "--port", port)
    _, errors = await child.communicate()
    assert child.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in errors.decode()
    assert "Traceback" not in errors.decode()
