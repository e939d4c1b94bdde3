"""A process is told from every other one, by what the kernel says of it, so that no stranger is ever signalled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from narwhal.core.lease import ProcessIdentity
from narwhal.ha import identity
from narwhal.ha.identity import boot_id, find_process, innermost_pid, own_identity, start_ticks

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def identity_of(pid: int) -> ProcessIdentity:
    ticks = start_ticks(pid)
    assert ticks is not None
    return replace(own_identity(), pid=pid, start_ticks=ticks)


def until(condition: object, *, deadline_s: float = 10.0) -> None:
    assert callable(condition)
    deadline = time.perf_counter() + deadline_s
    while not condition():
        assert time.perf_counter() < deadline, "waited in vain"
        time.sleep(0.01)


def test_this_process_finds_itself() -> None:
    own = own_identity()
    assert own.pid == os.getpid()
    assert own.boot_id
    assert own.start_ticks > 0
    assert find_process(own) == os.getpid()


def test_another_process_is_found_by_its_identity() -> None:
    with running(SLEEP) as process:
        assert find_process(identity_of(process.pid)) == process.pid


def test_a_reused_pid_is_not_the_process() -> None:
    with running(SLEEP) as process:
        wanted = identity_of(process.pid)
        assert find_process(replace(wanted, start_ticks=wanted.start_ticks - 1)) is None


def test_a_process_of_another_boot_is_not_found() -> None:
    assert find_process(replace(own_identity(), boot_id="another")) is None


def test_a_process_without_a_known_boot_is_not_found() -> None:
    assert find_process(replace(own_identity(), boot_id="")) is None


def test_a_process_that_has_ended_is_not_found() -> None:
    with running(SLEEP) as process:
        wanted = identity_of(process.pid)
    assert start_ticks(process.pid) is None
    assert find_process(wanted) is None


def test_a_killed_process_that_nobody_has_reaped_is_not_found() -> None:
    with running(SLEEP) as process:
        wanted = identity_of(process.pid)
        process.kill()
        state = Path(f"/proc/{process.pid}/stat")
        until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z")
        assert find_process(wanted) is None


RENAMED = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[1]), 0, 0, 0)
print("renamed", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("name", [b"a) R 1 2 3 (b", b"\xff\xfe)", b"two words", b"new\nline"], ids=repr)
def test_no_name_of_a_process_confuses_the_search(name: bytes) -> None:
    process = subprocess.Popen([sys.executable, "-c", RENAMED, name.hex()], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"renamed\n"
        assert find_process(identity_of(process.pid)) == process.pid
        assert find_process(own_identity()) == os.getpid()
    finally:
        process.kill()
        process.communicate()


def test_a_process_in_a_pid_namespace_is_found_by_the_pid_that_it_has_inside() -> None:
    """What a router in a container writes into the lease is its pid in there."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-p", "-f", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to make a pid namespace here")
    with running([unshare, "-p", "-f", "--kill-child", *SLEEP]) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(lambda: children.read_text().split())
        outside = int(children.read_text().split()[0])
        until(lambda: innermost_pid(outside) == 1)
        wanted = replace(identity_of(outside), pid=1)
        assert find_process(wanted) == outside
        assert find_process(replace(wanted, pid=outside)) is None


class FakeProc:
    """A /proc of our own, for what cannot be had for real."""

    def __init__(self, root: Path) -> None:
        self._root = root
        (root / "sys/kernel/random").mkdir(parents=True)
        (root / "sys/kernel/random/boot_id").write_text("boot\n")

    def add(self, pid: int, *, ticks: int, nspid: str | None) -> None:
        folder = self._root / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (python) S " + "0 " * 18 + f"{ticks} 0 0")
        lines = [f"Name:\tpython\nPid:\t{pid}"] + ([f"NSpid:\t{nspid}"] if nspid is not None else [])
        (folder / "status").write_text("\n".join(lines) + "\n")


@pytest.fixture
def fake_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    monkeypatch.setattr(identity, "PROC", tmp_path)
    return FakeProc(tmp_path)


def wanted(pid: int, ticks: int) -> ProcessIdentity:
    return ProcessIdentity(host="h", boot_id="boot", pid_namespace="n", pid=pid, start_ticks=ticks)


def test_the_innermost_of_nested_pids_counts(fake_proc: FakeProc) -> None:
    fake_proc.add(900, ticks=5, nspid="900\t45\t7")
    assert find_process(wanted(7, 5)) == 900
    assert find_process(wanted(45, 5)) is None


def test_a_kernel_without_pid_namespaces_names_processes_by_their_pid(fake_proc: FakeProc) -> None:
    fake_proc.add(900, ticks=5, nspid=None)
    assert find_process(wanted(900, 5)) == 900


def test_of_two_containers_that_started_at_once_neither_is_signalled(fake_proc: FakeProc) -> None:
    """Both have pid 1 inside and the same start tick; which of them is meant cannot be known."""
    fake_proc.add(900, ticks=5, nspid="900\t1")
    fake_proc.add(901, ticks=5, nspid="901\t1")
    assert find_process(wanted(1, 5)) is None


def test_a_process_whose_start_is_unknown_is_not_found(fake_proc: FakeProc) -> None:
    fake_proc.add(900, ticks=0, nspid="900")
    assert find_process(wanted(900, 0)) is None


def test_unreadable_entries_are_passed_over(fake_proc: FakeProc, tmp_path: Path) -> None:
    (tmp_path / "17").mkdir()
    (tmp_path / "18").mkdir()
    (tmp_path / "18" / "stat").write_text("18 (cut of")
    fake_proc.add(900, ticks=5, nspid="900")
    assert find_process(wanted(900, 5)) == 900
    assert start_ticks(17) is None
    assert start_ticks(18) is None


def test_where_there_is_no_proc_nothing_is_told_and_nothing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "PROC", tmp_path / "none")
    own = own_identity()
    assert (own.boot_id, own.start_ticks) == ("", 0)
    assert boot_id() == ""
    assert find_process(own) is None
