"""Work on engines runs side by side: a hung engine holds up nobody, and no error is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs

from narwhal.monitor.engine_tasks import EngineTasks
from tests.core.fleets import D1, D2, P1
from tests.ha.parts import now
from tests.virtual import virtual

Work = Callable[[], Coroutine[Any, Any, None]]


def work(length_s: float, done: list[str], name: str = "", error: Exception | None = None) -> Work:
    async def run() -> None:
        await asyncio.sleep(length_s)
        if error is not None:
            raise error
        done.append(name)

    return run


@virtual
async def test_settling_waits_for_quick_work_and_not_for_a_hung_engine() -> None:
    tasks, done = EngineTasks("health"), list[str]()
    tasks.start(P1, work(60, done, "p1"))
    tasks.start(D1, work(0.1, done, "d1"))
    await tasks.settle(timeout_s=0.25)
    assert done == ["d1"]
    assert now() == 0.25
    await tasks.cancel()


@virtual
async def test_settling_ends_as_soon_as_all_is_done() -> None:
    tasks, done = EngineTasks("health"), list[str]()
    tasks.start(P1, work(0.1, done))
    await tasks.settle(timeout_s=10)
    assert now() == 0.1


@virtual
async def test_a_busy_engine_gets_no_second_task_and_is_asked_again_when_it_is_free() -> None:
    tasks, done = EngineTasks("health"), list[str]()
    for name in ("first", "second"):
        tasks.start(P1, work(1, done, name))
    await tasks.settle(timeout_s=5)
    assert done == ["first"]
    tasks.start(P1, work(1, done, "third"))
    await tasks.settle(timeout_s=5)
    assert done == ["first", "third"]


@virtual
async def test_an_error_is_raised_by_the_settling_that_sees_it_and_once() -> None:
    tasks, done = EngineTasks("health"), list[str]()
    tasks.start(P1, work(1, done, error=RuntimeError("boom")))
    await tasks.settle(timeout_s=0.25)
    await asyncio.sleep(2)
    with pytest.raises(RuntimeError, match="boom"):
        await tasks.settle(timeout_s=0.25)
    await tasks.settle(timeout_s=0.25)


@virtual
async def test_of_several_errors_one_is_raised_and_each_is_logged_with_its_engine() -> None:
    tasks, done = EngineTasks("health"), list[str]()
    for engine in (P1, D1, D2):
        tasks.start(engine, work(0.1, done, error=RuntimeError(engine)))
    with capture_logs() as logs, pytest.raises(RuntimeError):
        await tasks.settle(timeout_s=1)
    assert sorted(line["engine"] for line in logs) == [D1, D2, P1]


@virtual
async def test_cancelling_ends_everything_and_raises_nothing() -> None:
    tasks, done = EngineTasks("health"), list[str]()
    tasks.start(P1, work(60, done))
    tasks.start(D1, work(60, done))
    await asyncio.sleep(0.1)
    await tasks.cancel()
    assert now() == 0.1
    await tasks.settle(timeout_s=1)
    assert done == []


@virtual
async def test_settling_without_work_takes_no_time() -> None:
    await EngineTasks("health").settle(timeout_s=1)
    assert now() == 0
