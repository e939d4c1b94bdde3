"""At most one task per engine, so that one hung engine delays nobody else and never piles up work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from narwhal.core.vocabulary import EngineId

log = structlog.get_logger()


class EngineTasks:
    """A named kind of work that runs beside the passes, one task per engine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: dict[EngineId, asyncio.Task[None]] = {}
        self._errors: list[BaseException] = []

    def start(self, engine: EngineId, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start `work` for `engine` unless it is still busy with the last one."""
        if engine in self._running:
            return
        task = asyncio.create_task(work(), name=f"{self._name}-{engine}")
        self._running[engine] = task
        task.add_done_callback(lambda done: self._finished(engine, done))

    async def settle(self, *, timeout_s: float) -> None:
        """Wait at most `timeout_s` for what is running, then raise the first error of anything that has finished."""
        if self._running:
            await asyncio.wait(self._running.values(), timeout=timeout_s)
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    async def cancel(self) -> None:
        """Stop everything that is running and wait for it."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finished(self, engine: EngineId, task: asyncio.Task[None]) -> None:
        del self._running[engine]
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.warning("engine_task_failed", work=self._name, engine=engine, error=repr(error))
            self._errors.append(error)
