"""kill-active: signal exactly the process that the lease names, then watch who follows it, and how soon.

The lease carries the holder's boot id, start time and pid; all three must fit a process of this kernel, or nothing is
signalled. The process is held by a pidfd between the check and the signal, so that a reused pid is never hit.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from narwhal.core.lease import LeaseRecord
from narwhal.core.vocabulary import FencingToken, PeerSign, RouterId
from narwhal.errors import NarwhalError, StoreUnavailable
from narwhal.ha.identity import boot_id, find_process, start_ticks
from narwhal.ports import LeaseStore, RouterPeer

LOOK_EVERY_S = 0.02
READY_TIMEOUT_S = 0.5
READY_PATIENCE_S = 3.0
"""A new term opens admission within milliseconds; a /ready that is silent for longer cannot be reached from here."""


class NobodyHolds(NarwhalError):
    """There is no active router: the lease is free."""


class HolderElsewhere(NarwhalError):
    """The holder runs on another host than this one; `record` says where."""

    def __init__(self, record: LeaseRecord) -> None:
        self.record = record
        super().__init__(
            f"{record.router} holds the lease and runs on host {record.process.host or '(unknown)'}, not here"
        )


class HolderUnknown(NarwhalError):
    """No process that is visible here is the one that the lease names; nothing was signalled."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process to be signalled: `pid` as seen from here, `handle` a pidfd that means this very process."""

    record: LeaseRecord
    pid: int
    handle: int
    lease_left_ms: int

    def send(self, number: signal.Signals) -> None:
        """Send `number` to it. Raises HolderUnknown when it has ended, PermissionError when we may not."""
        try:
            signal.pidfd_send_signal(self.handle, number)
        except ProcessLookupError as error:
            raise HolderUnknown(f"process {self.pid} of {self.record.router} ended by itself meanwhile") from error


@dataclass(frozen=True, slots=True)
class Successor:
    """Who holds the lease after the signal, and how long that took, in milliseconds.

    `ready_ms` is None when its /ready could not be reached from here or did not say 200 in time.
    """

    router: RouterId
    token: FencingToken
    url: str
    lease_ms: float
    ready_ms: float | None


@contextmanager
def active_process(record: LeaseRecord | None, *, lease_left_ms: int) -> Iterator[Holder]:
    """Give the process that `record` names.

    Raises NobodyHolds, HolderElsewhere, HolderUnknown; PermissionError is left to whoever signals.
    """
    if record is None:
        raise NobodyHolds("nobody holds the lease, so there is no active router to signal")
    wanted = record.process
    if not wanted.boot_id or wanted.boot_id != boot_id():
        raise HolderElsewhere(record)
    unknown = HolderUnknown(
        f"the lease names process {wanted.pid} of host {wanted.host}, started at tick {wanted.start_ticks}, and no"
        " process that is visible here is that one: it has ended, or runs in a container that cannot be seen from here"
        " (then run this on the host, or inside that container). Nothing was signalled"
    )
    pid = find_process(wanted)
    if pid is None:
        raise unknown
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise unknown from error
    try:
        if start_ticks(pid) != wanted.start_ticks:
            raise unknown
        yield Holder(record, pid, handle, lease_left_ms)
    finally:
        os.close(handle)


async def await_successor(
    store: LeaseStore, peer: RouterPeer, after: FencingToken, *, since: float, timeout_s: float
) -> Successor | None:
    """Return who took the lease with a token above `after`, and when it was ready; None if nobody did in `timeout_s`.

    `since` is the loop time from which the times count. A store that gives no answer is asked again.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while (record := await _above(store, after)) is None:
        if loop.time() >= deadline:
            return None
        await asyncio.sleep(LOOK_EVERY_S)
    lease_ms = (loop.time() - since) * 1000
    ready_ms = None
    deadline = min(deadline, loop.time() + READY_PATIENCE_S)
    while ready_ms is None and loop.time() < deadline:
        look = await peer.look(record.url, timeout_s=READY_TIMEOUT_S)
        if look.sign is PeerSign.READY:
            ready_ms = (loop.time() - since) * 1000
        else:
            await asyncio.sleep(LOOK_EVERY_S)
    return Successor(record.router, record.token, record.url, lease_ms, ready_ms)


async def _above(store: LeaseStore, token: FencingToken) -> LeaseRecord | None:
    try:
        seen = await store.observe()
    except StoreUnavailable:
        return None
    return seen.record if seen.record is not None and seen.record.token > token else None
