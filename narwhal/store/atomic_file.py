"""A file that is always whole: written beside, made durable, then renamed over its former self.

Source: source, "Atomic handoff writes"; decision 25. Everything here blocks; callers run it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from narwhal.errors import StoreUnavailable

LOCK_TRIES: Final = 50
LOCK_PAUSE_S: Final = 0.01

_NONCE: Final = secrets.token_hex(4)
_COUNTER: Final = itertools.count()


def replace_file(path: Path, data: bytes) -> None:
    """Make `data` the whole content of `path`, durably.

    A failure removes the temporary file, leaves the former content and raises StoreUnavailable saying why.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{_NONCE}-{next(_COUNTER)}.tmp")
    try:
        try:
            _write_durably(temporary, data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise StoreUnavailable(f"cannot write {path}: {why(error)}") from error


def read_file(path: Path) -> bytes | None:
    """Return the content of `path`, None when there is no such file. Raises StoreUnavailable when it is unreadable."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreUnavailable(f"cannot read {path}: {why(error)}") from error


def set_aside(path: Path) -> Path:
    """Move `path` to the first free `<name>.rejected-<n>` beside it and return that. Raises StoreUnavailable."""
    for number in itertools.count(1):
        kept = path.with_name(f"{path.name}.rejected-{number}")
        try:
            os.link(path, kept)
        except FileExistsError:
            continue
        except OSError as error:
            raise StoreUnavailable(f"cannot keep {path} as {kept.name}: {why(error)}") from error
        path.unlink()
        _sync_folder(path.parent)
        return kept
    raise AssertionError("numbers do not end")


def remove_stale(path: Path) -> list[Path]:
    """Remove the temporary files that dead processes left when they died while writing `path`; return them.

    The process id tells the living from the dead; an own id under another nonce is a former life's, as in containers,
    where every life has the same id.
    """
    prefix, removed = f".{path.name}.", []
    for candidate in path.parent.glob(f"{prefix}*.tmp"):
        pid, _, rest = candidate.name.removeprefix(prefix).partition("-")
        if pid.isdecimal() and not _writing(int(pid), nonce=rest.partition("-")[0]):
            candidate.unlink(missing_ok=True)
            removed.append(candidate)
    return removed


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Keep other writers of `path` out, so that comparing with what is stored and replacing it are one step.

    A writer that hangs inside must not stop the others for ever, and not every file system can lock: after half a
    second, or at once, the lock is done without. Only the comparison may then be outrun, never the file be torn.
    Raises StoreUnavailable when the folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path.with_name(f".{path.name}.lock"), "ab"))
        except OSError as error:
            raise StoreUnavailable(f"cannot write beside {path}: {why(error)}") from error
        _lock(file.fileno())
        yield


def _lock(descriptor: int) -> None:
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
        except OSError:
            return
        else:
            return


def make_folder(folder: Path) -> None:
    """Make sure that `folder` exists. Raises StoreUnavailable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"cannot make the folder {folder}: {why(error)}") from error


def why(error: OSError) -> str:
    """Return the system's words for `error` and what to do about it."""
    advice = {
        errno.ENOSPC: "free space on that disk or point router.state_dir at another",
        errno.EDQUOT: "raise the quota or point router.state_dir at another disk",
        errno.EROFS: "the file system is mounted read-only; point router.state_dir at a writable folder",
        errno.EACCES: "give the user of this process write access to the folder",
        errno.EPERM: "give the user of this process write access to the folder",
        errno.ENOENT: "create the folder or correct router.state_dir",
        errno.ENOTDIR: "router.state_dir leads through something that is not a folder",
    }.get(error.errno or 0, "check the disk and router.state_dir")
    return f"{error.strerror or error}; {advice}"


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; without this a power loss may bring the old name back."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _writing(pid: int, *, nonce: str) -> bool:
    if pid == os.getpid():
        return nonce == _NONCE
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
