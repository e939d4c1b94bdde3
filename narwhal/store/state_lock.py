"""One process per router id and state folder: a lock that the kernel drops with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from narwhal.errors import StateInUse, StoreUnavailable


@contextmanager
def lock_state(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process, making it if need be.

    Raises StateInUse when another process holds it, StoreUnavailable when the folder cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreUnavailable(
            f"state folder {folder}: {error.strerror}; set router.state_dir to a folder that can be written"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StateInUse(
            f"state folder {folder} is in use by another narwhal-serve; give each router its own router.id"
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)
