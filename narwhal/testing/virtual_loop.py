"""An asyncio event loop whose clock jumps to the next timer: hours pass in seconds, and nothing ever waits.

It has no sockets, no signals and no threads: `asyncio.to_thread` runs its function at once. Time stands still while
callbacks run, so equal inputs give equal runs.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

CALLBACKS_PER_INSTANT_MAX: Final = 1_000_000
CANCELLED_KEPT_MAX: Final = 50


class Deadlock(Exception):
    """Tasks wait, but no timer and no callback is left that could ever wake one."""


class StandStill(Exception):
    """Callbacks call each other without end and let no time pass."""


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. Its time starts at 0 and moves only when nothing is left to do at this instant."""

    # Of BaseEventLoop; typeshed does not know them.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._callbacks_now = 0

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._now

    def run_in_executor(  # type: ignore[override]  # typeshed ties `args` to `func`
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call `func` at once: there are no threads, and so nothing that could answer while time stands still."""
        answer = self.create_future()
        try:
            answer.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whatever the function raises belongs to whoever awaits it
            answer.set_exception(error)
        return answer

    def run_handle(self, handle: asyncio.Handle) -> None:
        """Run one callback; a subclass may hold it back instead."""
        handle._run()

    def _run_once(self) -> None:
        self._drop_cancelled()
        if not self._ready and not self._stopping:
            self._jump()
        while self._scheduled and self._scheduled[0].when() <= self._now:
            self._ready.append(self._pop_timer())
        self._watch_progress()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                self.run_handle(handle)

    def _jump(self) -> None:
        if not self._scheduled:
            waiting = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self))) or "none"
            raise Deadlock(f"at {self._now:g} s nothing is left to run; tasks that wait for ever: {waiting}")
        self._now = max(self._now, self._scheduled[0].when())
        self._callbacks_now = 0

    def _watch_progress(self) -> None:
        self._callbacks_now += len(self._ready)
        if self._callbacks_now > CALLBACKS_PER_INSTANT_MAX:
            self._callbacks_now = 0
            raise StandStill(
                f"more than {CALLBACKS_PER_INSTANT_MAX} callbacks ran while the clock stood at {self._now:g} s"
            )

    def _drop_cancelled(self) -> None:
        if self._timer_cancelled_count > CANCELLED_KEPT_MAX and 2 * self._timer_cancelled_count > len(self._scheduled):
            self._sweep()
        while self._scheduled and self._scheduled[0].cancelled():
            self._pop_timer()
            self._timer_cancelled_count -= 1

    def _sweep(self) -> None:
        """Forget every cancelled timer: most time-outs never come to pass."""
        for timer in self._scheduled:
            timer._scheduled = not timer.cancelled()  # type: ignore[attr-defined]
        self._scheduled = [timer for timer in self._scheduled if not timer.cancelled()]
        heapq.heapify(self._scheduled)
        self._timer_cancelled_count = 0

    def _pop_timer(self) -> asyncio.TimerHandle:
        timer = heapq.heappop(self._scheduled)
        timer._scheduled = False  # type: ignore[attr-defined]
        return timer

    def _write_to_self(self) -> None:
        """There is no selector to wake."""

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no sockets."""


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a loop of its own in virtual time and return its result.

    Raises Deadlock when nothing could ever wake it; every task that is left is cancelled.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
