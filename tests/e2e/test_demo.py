"""`narwhal demo`: one command brings a pair up, and leaves nothing behind; the drill proves a takeover by itself."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from narwhal.demo.ports import choose_ports, is_free
from tests.e2e.running import LEASE_TTL_S, RunningDemo, alive, base_port, narwhal, running_demo, wait_until


def ports_of(demo: RunningDemo) -> list[int]:
    parts = [*demo.document["routers"], *demo.document["engines"]]
    urls = [demo.document["redis"], *(part[key] for part in parts for key in ("url", "admin_url"))]
    return [port for url in urls if (port := urlsplit(url).port) is not None]


def test_ctrl_c_leaves_no_process_port_or_file_even_where_a_port_was_busy(tmp_path: Path) -> None:
    free = choose_ports(base_port(), engines=4, redis=True)[0]
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", free.traffic(1)))
        taken.listen(1)
        with running_demo(tmp_path, "--ports-from", str(free.base)) as demo:
            assert f"port {free.traffic(1)} is in use" in demo.said
            pids, ports, folder = demo.pids(), ports_of(demo), demo.folder
            assert min(ports) >= free.base + 1000
            assert len(pids) == 7
            assert len(ports) == 13
            assert all(alive(pid) for pid in pids)
            assert folder.is_dir()
            assert demo.stop(signal.SIGINT) == 0
    assert [pid for pid in pids if alive(pid)] == []
    assert [port for port in ports if not is_free(port)] == []
    assert not folder.exists()


def test_a_demo_that_is_killed_takes_its_processes_with_it(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with running_demo(tmp_path, "--state-dir", str(state)) as demo:
        pids = demo.pids()
        demo.stop(signal.SIGKILL)
        wait_until(lambda: not any(alive(pid) for pid in pids), "every process has ended", within_s=10)
    assert (state / "router-a.log").exists()


def test_the_drill_passes_and_says_so_in_one_json_object(tmp_path: Path) -> None:
    done = narwhal(
        *("demo", "--drill", "kill-active", "--json", "--ports-from", str(base_port())),
        *("--state-dir", str(tmp_path / "state")),
        timeout_s=140,
    )
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert document["passed"] is True
    assert document["problems"] == []
    assert 0 < document["takeover_ms"] <= LEASE_TTL_S * 1000 + 1500
    assert document["fencing_token_after"] > document["fencing_token_before"] > 0
    assert document["requests_ok"] > 50
    assert document["requests_failed_other"] == 0
    assert document["overlap_ms"] == 0
    assert document["state_carried"] is True


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--engine", "prefill=http://127.0.0.1:1"), "at least one prefill and one decode"),
        (("--engine", "router=http://127.0.0.1:1"), "prefill=URL or decode=URL"),
        (("--engine", "prefill=127.0.0.1:1"), "http://"),
        (
            (
                "--drill",
                "kill-active",
                "--engine",
                "prefill=http://127.0.0.1:1",
                "--engine",
                "decode=http://127.0.0.1:2",
            ),
            "--drill needs the stub engines",
        ),
        (("--lease-ttl", "0.1"), "0.5 to 60"),
    ],
)
def test_arguments_that_make_no_sense_exit_2_and_start_nothing(words: tuple[str, ...], told: str) -> None:
    done = narwhal("demo", *words)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_real_engine_that_does_not_answer_is_named(tmp_path: Path) -> None:
    done = narwhal("demo", "--engine", "prefill=http://127.0.0.1:1", "--engine", "decode=http://127.0.0.1:2")
    assert done.returncode == 1
    assert "prefill engine http://127.0.0.1:1 does not tell its models" in done.stderr
