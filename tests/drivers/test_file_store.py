"""The local handoff file: always whole, whoever writes and however writing fails. Source: "Atomic handoff writes"."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from narwhal.core.handoff import HandoffDocument
from narwhal.core.vocabulary import FencingToken
from narwhal.errors import HandoffRefused, HandoffRejected, StoreUnavailable
from narwhal.store.atomic_file import replace_file
from narwhal.store.file_store import FileHandoffStore
from narwhal.store.ha_record import HaRecord
from tests.contract.samples import handoff

WRITER = """
import asyncio, sys
from pathlib import Path
from narwhal.errors import HandoffRefused
from narwhal.store.file_store import FileHandoffStore
from tests.contract.samples import handoff

async def main(path, first, last, step):
    store = FileHandoffStore(Path(path))
    print("ready", flush=True)
    for version in range(first, last, step):
        try:
            await store.put(handoff(1, version, mark=first))
        except HandoffRefused:
            pass

asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "handoff.json"


@pytest.fixture
def store(path: Path) -> FileHandoffStore:
    return FileHandoffStore(path)


def writer(path: Path, *numbers: int) -> subprocess.Popen[str]:
    """A process that writes versions first, first + step, ... below last."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), *map(str, numbers)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def beside(path: Path) -> list[str]:
    """What lies in the folder but the document and its lock."""
    return sorted(p.name for p in path.parent.iterdir() if p.name not in (path.name, f".{path.name}.lock"))


def ended_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


async def test_the_file_is_the_readable_document_and_nothing_else_stays(store: FileHandoffStore, path: Path) -> None:
    document = handoff(1, 1)
    await store.put(document)
    assert path.read_text() == document.encode()
    assert beside(path) == []


async def test_processes_that_write_at_once_leave_one_complete_newest_document(
    store: FileHandoffStore, path: Path
) -> None:
    await store.put(handoff(1, 1))
    writers = [writer(path, first, 120, 3) for first in (2, 3, 4)]
    seen = [1]
    while any(process.poll() is None for process in writers):
        document = await store.get()
        assert document is not None
        seen.append(document.version)
    assert [process.wait() for process in writers] == [0, 0, 0]
    for process in writers:
        assert process.stdout is not None
        process.stdout.close()
    assert await store.get() == handoff(1, 119, mark=2)
    assert seen == sorted(seen), "versions never fall"
    assert beside(path) == []


async def test_a_writer_killed_at_any_moment_leaves_a_complete_document(store: FileHandoffStore, path: Path) -> None:
    for round_number in range(4):
        process = writer(path, 10**6 * round_number + 1, 10**9, 1)
        async with asyncio.timeout(20):
            while (document := await store.get()) is None or document.version < 10**6 * round_number + 2:
                await asyncio.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        assert isinstance(await store.get(), HandoffDocument)
    await FileHandoffStore(path).put(handoff(2, 1))
    assert beside(path) == [], "what the dead left is removed"


async def test_a_failed_write_leaves_the_old_document_and_no_temporary_file(
    store: FileHandoffStore, path: Path
) -> None:
    """The disk is full after 100 bytes, for a process under a file size limit."""
    await store.put(handoff(1, 1))
    limited = (
        "import asyncio, resource, sys\n"
        "from pathlib import Path\n"
        "from narwhal.store.file_store import FileHandoffStore\n"
        "from tests.contract.samples import handoff\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "asyncio.run(FileHandoffStore(Path(sys.argv[1])).put(handoff(1, 2)))\n"
    )
    done = subprocess.run([sys.executable, "-c", limited, str(path)], capture_output=True, text=True, check=False)
    assert f"StoreUnavailable: cannot write {path}: File too large; check the disk" in done.stderr
    assert await store.get() == handoff(1, 1)
    assert beside(path) == []


async def test_a_failed_rename_leaves_no_temporary_file(tmp_path: Path) -> None:
    in_the_way = tmp_path / "handoff.json"
    in_the_way.mkdir()
    (in_the_way / "something").touch()
    with pytest.raises(StoreUnavailable, match=r"handoff\.json"):
        await FileHandoffStore(in_the_way).put(handoff(1, 1))
    assert beside(in_the_way) == []


async def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("not a folder")
    store = FileHandoffStore(tmp_path / "state" / "deeper" / "handoff.json")
    with pytest.raises(StoreUnavailable, match=r"state/deeper.*router\.state_dir"):
        await store.put(handoff(1, 1))
    with pytest.raises(StoreUnavailable, match="cannot read"):
        await store.get()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only folder")
async def test_a_read_only_folder_is_named_with_what_to_do(store: FileHandoffStore, path: Path) -> None:
    await store.put(handoff(1, 1))
    path.parent.chmod(0o500)
    try:
        with pytest.raises(StoreUnavailable, match="write access to the folder"):
            await store.put(handoff(1, 2))
    finally:
        path.parent.chmod(0o700)
    assert await store.get() == handoff(1, 1)


async def test_opening_removes_what_dead_writers_left_and_nothing_else(store: FileHandoffStore, path: Path) -> None:
    path.parent.mkdir()
    stale = [f".handoff.json.{ended_pid()}-ab12-0.tmp", f".handoff.json.{os.getpid()}-0ld0l1fe-0.tmp"]
    kept = sorted(
        [f".handoff.json.{os.getppid()}-ab12-0.tmp", ".handoff.json.notes.tmp", ".ha.json.1-a-0.tmp", "x.tmp"]
    )
    for name in (*stale, *kept):
        (path.parent / name).write_text("half a docu")
    await store.put(handoff(1, 1))
    assert beside(path) == kept


async def test_comparing_and_replacing_are_one_step_among_writers(store: FileHandoffStore, path: Path) -> None:
    await store.put(handoff(1, 1))
    with open(path.with_name(".handoff.json.lock"), "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        older = asyncio.create_task(store.put(handoff(1, 2)))
        await asyncio.sleep(0.15)
        replace_file(path, handoff(1, 3).encode().encode())
    with pytest.raises(HandoffRefused, match="VERSION"):
        await older
    assert await store.get() == handoff(1, 3)


async def test_a_writer_that_hangs_does_not_stop_the_others(store: FileHandoffStore, path: Path) -> None:
    await store.put(handoff(1, 1))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    with open(path.with_name(".handoff.json.lock"), "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        async with asyncio.timeout(20):
            await store.put(handoff(1, 2))
    ticking.cancel()
    assert await store.get() == handoff(1, 2)
    assert ticks > 10, "the loop went on meanwhile"


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\x00", b'{"schema":"other"}', b"[]"])
async def test_an_unreadable_document_is_rejected_and_kept_beside_by_the_next_write(
    store: FileHandoffStore, path: Path, damage: bytes
) -> None:
    path.parent.mkdir()
    path.write_bytes(damage)
    with pytest.raises(HandoffRejected):
        await store.get()
    assert path.read_bytes() == damage, "reading changes nothing"
    await store.put(handoff(1, 1))
    assert await store.get() == handoff(1, 1)
    assert beside(path) == ["handoff.json.rejected-1"]
    assert (path.parent / "handoff.json.rejected-1").read_bytes() == damage


async def test_rejected_documents_are_kept_untouched_under_the_next_number(store: FileHandoffStore, path: Path) -> None:
    assert await store.reject() is None
    for number in (1, 2, 3):
        await store.put(handoff(1, number))
        kept = await store.reject()
        assert kept == path.with_name(f"handoff.json.rejected-{number}")
        assert kept.read_text() == handoff(1, number).encode()
        assert await store.get() is None
    assert len(beside(path)) == 3


async def test_a_document_refused_by_the_file_is_still_there_after_reopening(path: Path) -> None:
    await FileHandoffStore(path).put(handoff(5, 9))
    with pytest.raises(HandoffRefused, match="STALE_TOKEN"):
        await FileHandoffStore(path).put(handoff(4, 10))
    assert await FileHandoffStore(path).get() == handoff(5, 9)


async def test_the_highest_token_is_remembered_over_restarts_and_never_falls(tmp_path: Path) -> None:
    path = tmp_path / "state" / "ha.json"
    record = HaRecord(path)
    assert await record.floor() == 0
    await record.remember(FencingToken(2**53 - 2))
    await record.remember(FencingToken(7))
    assert await record.floor() == 2**53 - 2
    assert await HaRecord(path).floor() == 2**53 - 2
    await HaRecord(path).remember(FencingToken(8))
    assert path.read_text() == f'{{"fencing_token": {2**53 - 2}}}\n'
    assert beside(path) == []


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"fencing_token":null}', '{"other":1}'])
async def test_a_damaged_record_is_kept_beside_and_counts_as_none(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "ha.json"
    path.write_text(damage)
    assert await HaRecord(path).floor() == 0
    assert (tmp_path / "ha.json.rejected-1").read_text() == damage
    await HaRecord(path).remember(FencingToken(3))
    assert await HaRecord(path).floor() == 3


async def test_a_record_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("not a folder")
    with pytest.raises(StoreUnavailable, match=r"router\.state_dir"):
        await HaRecord(tmp_path / "state" / "ha.json").remember(FencingToken(1))
