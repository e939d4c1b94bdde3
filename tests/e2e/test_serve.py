"""`narwhal-serve` as a process: what it does about mistakes and about a Redis that is not there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from narwhal.demo.ports import is_free
from narwhal.demo.redis_server import RedisServer
from tests.e2e.running import ask, base_port, wait_until

FIVE_MISTAKES = """
[serving]
models = []
[router]
port = 70000
[ha]
redis_url = "http://10.0.0.5"
lease_ttl_s = 0.5
[[engines]]
id = "p1"
url = "10.0.0.1:8000"
role = "prefil"
"""


@contextmanager
def serving(config: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run `narwhal-serve` with `config`; give the process and its log, and end it afterwards."""
    log = config.with_suffix(".log")
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "narwhal", "serve", "--config", str(config)], stdout=stderr, stderr=stderr
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait(timeout=10)


def events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def write_config(folder: Path, *, redis_port: int, port: int) -> Path:
    """A router whose engines do not exist, in front of a Redis on `redis_port`."""
    path = folder / "narwhal.toml"
    path.write_text(
        f"""
[router]
port = {port}
admin_port = 0
state_dir = "{folder}/state"
[serving]
models = ["m"]
[ha]
redis_url = "redis://127.0.0.1:{redis_port}/0"
[recovery]
liveness_every_s = 0.5
[[engines]]
id = "p1"
url = "http://127.0.0.1:1"
role = "prefill"
[[engines]]
id = "d1"
url = "http://127.0.0.1:2"
role = "decode"
"""
    )
    return path


@pytest.fixture
def ports() -> tuple[int, int]:
    """Two ports that nobody listens on."""
    first, second, *_ = (port for port in range(base_port() + 400, base_port() + 499) if is_free(port))
    return first, second


def test_five_mistakes_are_all_named_with_their_paths_and_exit_2(tmp_path: Path) -> None:
    path = tmp_path / "narwhal.toml"
    path.write_text(FIVE_MISTAKES)
    done = subprocess.run(
        [sys.executable, "-m", "narwhal", "serve", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for mistake in ("serving.models", "router.port", "ha.redis_url", "engines.0.url", "engines.0.role"):
        assert mistake in done.stderr


def test_an_unreachable_redis_is_said_and_retried_until_it_is_there(tmp_path: Path, ports: tuple[int, int]) -> None:
    redis_port, port = ports
    with serving(write_config(tmp_path, redis_port=redis_port, port=port)) as (process, log):
        wait_until(
            lambda: any(f"127.0.0.1:{redis_port}" in json.dumps(event) for event in events(log)), "Redis is missed"
        )
        assert ask(f"http://127.0.0.1:{port}/health")[0] == 200
        wait_until(
            lambda: "redis" in str((ask(f"http://127.0.0.1:{port}/ready")[1] or {}).get("reason")), "/ready says so"
        )
        status, document = ask(f"http://127.0.0.1:{port}/ready")
        assert (status, document["role"]) == (503, "standby")
        with RedisServer.start(port=redis_port):
            wait_until(
                lambda: any(event["event"] == "lease_acquired" for event in events(log)), "the lease is taken at last"
            )
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
    assert not any("exception" in event for event in events(log))


def test_a_router_without_engines_is_active_and_says_what_it_lacks(tmp_path: Path, ports: tuple[int, int]) -> None:
    redis_port, port = ports
    with (
        RedisServer.start(port=redis_port),
        serving(write_config(tmp_path, redis_port=redis_port, port=port)) as (process, log),
    ):
        wait_until(
            lambda: "no eligible" in str((ask(f"http://127.0.0.1:{port}/ready")[1] or {}).get("reason")),
            "both engines are ejected",
            within_s=60,
        )
        assert ask(f"http://127.0.0.1:{port}/health")[0] == 200
        assert process.poll() is None
    assert any(event["event"] == "engine_ejected" for event in events(log))
