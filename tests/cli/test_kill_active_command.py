"""`narwhal ha kill-active`: exit codes and words, with a bystander in the part of the active router."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from narwhal.cli import main
from narwhal.core.lease import LeaseRecord, ProcessIdentity
from narwhal.ha.identity import boot_id, start_ticks
from tests.cli.clusters import ScriptedCluster


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until it is ended."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield process
        process.kill()


def record_of(cluster: ScriptedCluster, process: subprocess.Popen[bytes]) -> LeaseRecord:
    ticks = start_ticks(process.pid)
    assert ticks is not None
    identity = ProcessIdentity("this-host", boot_id(), "", process.pid, ticks)
    return replace(cluster.record("router-a"), process=identity)


async def test_without_a_successor_the_kill_is_reported_as_failed(
    cluster: ScriptedCluster, bystander: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    await cluster.hold(record_of(cluster, bystander))
    assert await cluster.run("ha", "kill-active", "--timeout", "0.2", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["successor"] is None
    assert document["holder"]["pid"] == bystander.pid
    assert bystander.wait(timeout=10) == -9


async def test_a_stopped_holder_is_said_to_wake_up_by_hand(
    cluster: ScriptedCluster, bystander: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    await cluster.hold(record_of(cluster, bystander))
    assert await cluster.run("ha", "kill-active", "--signal", "STOP", "--timeout", "0.2") == 1
    assert f"kill -CONT {bystander.pid}" in capsys.readouterr().out
    assert bystander.poll() is None


async def test_a_holder_on_another_host_is_left_alone_and_the_way_there_is_shown(
    cluster: ScriptedCluster, bystander: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    record = record_of(cluster, bystander)
    far = replace(record, process=replace(record.process, boot_id="another", host="far-away"))
    await cluster.hold(far)
    assert await cluster.run("ha", "kill-active", "--signal", "TERM") == 4
    said = capsys.readouterr().err
    assert "far-away" in said
    assert f"narwhal ha kill-active --redis {cluster.redis_url} --cluster {cluster.name} --signal TERM" in said
    assert f"kill -TERM {bystander.pid}" in said
    assert bystander.poll() is None


async def test_a_process_with_another_start_time_is_not_signalled(
    cluster: ScriptedCluster, bystander: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    record = record_of(cluster, bystander)
    await cluster.hold(replace(record, process=replace(record.process, start_ticks=1)))
    assert await cluster.run("ha", "kill-active") == 5
    assert "Nothing was signalled" in capsys.readouterr().err
    assert bystander.poll() is None


async def test_without_an_active_router_nothing_is_signalled(
    cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await cluster.run("ha", "kill-active") == 1
    assert "nobody holds the lease" in capsys.readouterr().err


def test_an_unreachable_redis_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ha", "kill-active", "--redis", "redis://127.0.0.1:1/0"]) == 3
    assert "redis://127.0.0.1:1/0" in capsys.readouterr().err
