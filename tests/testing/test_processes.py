"""A frozen process does nothing, however much happens around it, and goes on where it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from narwhal.testing.processes import PROCESS, process_loop, run_processes, task_name


def with_processes(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        run_processes(test())

    return run


async def tick(ticks: list[float], every_s: float = 1.0) -> None:
    while True:
        await asyncio.sleep(every_s)
        ticks.append(asyncio.get_running_loop().time())


@with_processes
async def test_processes_run_side_by_side() -> None:
    loop, ticks = process_loop(), dict[str, list[float]](a=[], b=[])
    for name in ticks:
        loop.start(name, tick(ticks[name]), name="ticker")
    await asyncio.sleep(3.5)
    assert ticks == {"a": [1, 2, 3], "b": [1, 2, 3]}


@with_processes
async def test_a_frozen_process_misses_its_timers_and_its_clock_goes_on() -> None:
    loop, ticks = process_loop(), dict[str, list[float]](a=[], b=[])
    for name in ticks:
        loop.start(name, tick(ticks[name]), name="ticker")
    await asyncio.sleep(1.5)
    loop.freeze("a")
    await asyncio.sleep(3)
    assert ticks["a"] == [1]
    loop.thaw("a")
    await asyncio.sleep(1.1)
    assert ticks == {"a": [1, 4.5, 5.5], "b": [1, 2, 3, 4, 5]}


@with_processes
async def test_what_a_task_starts_belongs_to_its_process() -> None:
    loop, ran = process_loop(), list[str]()

    async def parent() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())

    async def child() -> None:
        await asyncio.sleep(1)
        ran.append(PROCESS.get())

    loop.start("a", parent(), name="parent")
    await asyncio.sleep(0.5)
    loop.freeze("a")
    await asyncio.sleep(5)
    assert ran == []
    loop.thaw("a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ran == ["a"]


@with_processes
async def test_an_answer_from_outside_wakes_nobody_in_a_frozen_process() -> None:
    loop, woken = process_loop(), list[float]()
    answer: asyncio.Future[None] = loop.create_future()

    async def wait() -> None:
        await answer
        woken.append(loop.time())

    loop.start("a", wait(), name="waiter")
    await asyncio.sleep(0)
    loop.freeze("a")
    loop.call_outside(1, answer.set_result, None)
    await asyncio.sleep(3)
    assert answer.done()
    assert woken == []
    loop.thaw("a")
    await asyncio.sleep(0.1)
    assert woken == [3]


@with_processes
async def test_the_outside_goes_on_even_when_a_process_asked_for_it() -> None:
    loop, arrived = process_loop(), list[float]()

    async def send() -> None:
        loop.call_outside(1, lambda: arrived.append(loop.time()))
        await asyncio.sleep(10)

    loop.start("a", send(), name="sender")
    await asyncio.sleep(0)
    loop.freeze("a")
    await asyncio.sleep(3)
    assert arrived == [1]


@with_processes
async def test_calls_into_a_frozen_process_wait_in_their_order() -> None:
    loop, served = process_loop(), list[int]()
    loop.freeze("a")
    for number in range(3):
        loop.call_in("a", served.append, number)
    await asyncio.sleep(1)
    assert served == []
    loop.thaw("a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert served == [0, 1, 2]


@with_processes
async def test_a_process_can_be_frozen_at_any_step_of_a_task() -> None:
    loop, steps = process_loop(), list[int]()

    async def work() -> None:
        for number in range(10):
            steps.append(number)
            await asyncio.sleep(0)

    seen: list[str] = []

    def stop_at_the_fourth(process: str, handle: asyncio.Handle) -> None:
        seen.append(task_name(handle))
        if seen.count("a/work") == 4:
            loop.freeze(process)

    loop.watch_steps(stop_at_the_fourth)
    loop.start("a", work(), name="work")
    await asyncio.sleep(1)
    assert steps == [0, 1, 2]
    assert loop.frozen("a")
    loop.watch_steps(None)
    loop.thaw("a")
    await asyncio.sleep(1)
    assert steps == list(range(10))


@with_processes
async def test_a_timer_that_was_cancelled_after_a_thaw_does_not_fire() -> None:
    """Both were due while the process was frozen; the first one that runs cancels the other."""
    loop, fired = process_loop(), list[str]()

    async def set_timers() -> None:
        second = loop.call_later(2, fired.append, "second")
        loop.call_later(1, second.cancel)
        loop.call_later(1, fired.append, "first")

    loop.start("a", set_timers(), name="timers")
    await asyncio.sleep(0)
    loop.freeze("a")
    await asyncio.sleep(5)
    loop.thaw("a")
    await asyncio.sleep(1)
    assert fired == ["first"]
