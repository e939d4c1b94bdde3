"""Several processes on one virtual loop: each can be frozen, as SIGSTOP does, or killed, between any two of its steps.

Whatever a process starts belongs to it: its tasks, their timers, and the wake-ups of what they wait for. While it is
frozen its clock goes on and the world goes on; its own callbacks wait, and run in their order when it is thawed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final

from narwhal.testing.virtual_loop import VirtualLoop

NOBODY: Final = ""
PROCESS: Final[ContextVar[str]] = ContextVar("process", default=NOBODY)
"""Which process the running callback belongs to; `NOBODY` is the world outside: networks, clients, servers."""


class ProcessLoop(VirtualLoop):
    """A virtual loop that knows whose callbacks it runs."""

    def __init__(self) -> None:
        super().__init__()
        self._outside = Context()
        self._contexts: dict[str, Context] = {}
        self._parked: dict[str, list[asyncio.Handle]] = {}
        self._watch: Callable[[str, asyncio.Handle], None] | None = None

    def frozen(self, process: str) -> bool:
        """Whether the callbacks of `process` wait."""
        return process in self._parked

    def freeze(self, process: str) -> None:
        """Let no callback of `process` run until it is thawed. A killed process is one that never is."""
        self._parked.setdefault(process, [])

    def thaw(self, process: str) -> None:
        """Run what waited, in its order, and let `process` go on."""
        self._ready.extend(self._parked.pop(process, []))

    def thaw_all(self) -> None:
        """Let every process go on, and freeze none any more."""
        self._watch = None
        for process in list(self._parked):
            self.thaw(process)

    def start(self, process: str, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Start a task that belongs to `process`."""
        return self.create_task(work, name=f"{process}/{name}", context=self._context_of(process).copy())

    def call_in(self, process: str, callback: Callable[..., object], *args: Any) -> None:
        """Run `callback` in `process` as soon as it can."""
        self.call_soon(callback, *args, context=self._context_of(process))

    def run_in(self, process: str, callback: Callable[[], object]) -> None:
        """Run `callback` in `process` at this instant, or as soon as it is thawed."""
        if self.frozen(process):
            self.call_in(process, callback)
        else:
            self._context_of(process).run(callback)

    def call_outside(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Run `callback` in the world outside after `delay_s`: no process can hold it up."""
        return self.call_later(delay_s, callback, *args, context=self._outside)

    def watch_steps(self, watch: Callable[[str, asyncio.Handle], None] | None) -> None:
        """Call `watch` before each callback of a process; it may freeze that process at this very step."""
        self._watch = watch

    def run_handle(self, handle: asyncio.Handle) -> None:
        """Run the callback, or park it while its process is frozen."""
        context: Context = handle._context  # type: ignore[attr-defined]
        process = context.get(PROCESS, NOBODY)
        if process and self._watch is not None and process not in self._parked:
            self._watch(process, handle)
        if process in self._parked:
            self._parked[process].append(handle)
        else:
            super().run_handle(handle)

    def _context_of(self, process: str) -> Context:
        if process not in self._contexts:
            context = copy_context()
            context.run(PROCESS.set, process)
            self._contexts[process] = context
        return self._contexts[process]


def task_name(handle: asyncio.Handle) -> str:
    """Return the name of the task whose step `handle` is, or an empty string for any other callback."""
    owner = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return owner.get_name() if isinstance(owner, asyncio.Task) else ""


def process_loop() -> ProcessLoop:
    """Return the running loop, which must be one with processes."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ProcessLoop), "run this with narwhal.testing.processes.run_processes"
    return loop


def run_processes(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` in virtual time on a loop with processes; then end every process, the frozen ones too.

    Raises Deadlock when nothing could ever wake `main`.
    """
    with asyncio.Runner(loop_factory=ProcessLoop) as runner:
        try:
            runner.run(main)
        finally:
            loop = runner.get_loop()
            assert isinstance(loop, ProcessLoop)
            loop.thaw_all()
