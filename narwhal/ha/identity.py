"""Which process this is: read once from /proc, written into the lease, checked by `kill-active` before it signals.

Source: proc(5): field 22 of /proc/<pid>/stat is the start time in clock ticks since boot, the same in every pid
namespace of one kernel; /proc/sys/kernel/random/boot_id names the running kernel. Source: pid_namespaces(7): the link
/proc/<pid>/ns/pid names the namespace.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from narwhal.core.lease import ProcessIdentity

PROC = Path("/proc")
ENDED = frozenset({b"Z", b"X", b"x"})
"""States of a process that has ended and only waits to be reaped."""


def own_identity() -> ProcessIdentity:
    """Return the identity of this process; fields that this platform does not tell are empty or 0."""
    pid = os.getpid()
    return ProcessIdentity(
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        pid=pid,
        start_ticks=start_ticks(pid) or 0,
    )


def boot_id() -> str:
    """Return the name of the running kernel's boot, or an empty string where there is none."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Return the name of the pid namespace that this process lives in, e.g. `pid:[4026531836]`, or an empty string."""
    try:
        return os.readlink(PROC / "self/ns/pid")
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot; None if no such process runs (any more)."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name is whatever bytes the process chose, parentheses included; the last one ends it.
    fields = stat.rpartition(b")")[2].split()
    if len(fields) < 20 or fields[0] in ENDED:
        return None
    return int(fields[19])


def find_process(wanted: ProcessIdentity) -> int | None:
    """Return the pid, as seen from here, of exactly the `wanted` process, or None if it does not run on this kernel.

    A process in a container has another pid inside; it is found by the innermost pid in NSpid and its start time. None
    also when several fit, as processes of containers that started together may: the wrong one must not be signalled.
    """
    if not wanted.boot_id or not wanted.start_ticks or wanted.boot_id != boot_id():
        return None
    found = [
        pid
        for pid in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
        if start_ticks(pid) == wanted.start_ticks and innermost_pid(pid) == wanted.pid
    ]
    return found[0] if len(found) == 1 else None


def innermost_pid(pid: int) -> int | None:
    """Return the pid that process `pid` has in its own pid namespace."""
    try:
        status = (PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid
