"""Virtual time: it passes without waiting, in order, and never lets a lost wake-up hang a test."""

from __future__ import annotations

import asyncio
import time

import pytest

from narwhal.testing import virtual_loop
from narwhal.testing.virtual_loop import Deadlock, StandStill, VirtualLoop, run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_passes_in_no_time() -> None:
    async def sleep_a_day() -> float:
        await asyncio.sleep(86_400)
        return now()

    began = time.perf_counter()
    assert run_virtual(sleep_a_day()) == 86_400
    assert time.perf_counter() - began < 5


def test_sleepers_wake_in_the_order_of_their_times_whatever_the_order_of_their_start() -> None:
    async def race() -> list[tuple[float, str]]:
        woken: list[tuple[float, str]] = []

        async def sleeper(name: str, length_s: float) -> None:
            await asyncio.sleep(length_s)
            woken.append((now(), name))

        async with asyncio.TaskGroup() as group:
            for name, length_s in (("third", 3), ("first", 1), ("second", 2)):
                group.create_task(sleeper(name, length_s))
        return woken

    assert run_virtual(race()) == [(1, "first"), (2, "second"), (3, "third")]


def test_time_stands_still_while_callbacks_run() -> None:
    async def busy() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return now()

    assert run_virtual(busy()) == 0


def test_a_timeout_ends_what_would_wait_for_ever() -> None:
    async def impatient() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        return now()

    assert run_virtual(impatient()) == 7


def test_a_cancelled_timer_neither_fires_nor_moves_time() -> None:
    async def change_of_mind() -> float:
        fired: list[int] = []
        timer = asyncio.get_running_loop().call_later(5, fired.append, 1)
        asyncio.get_running_loop().call_later(50, fired.append, 2).cancel()
        timer.cancel()
        await asyncio.sleep(1)
        assert fired == []
        return now()

    assert run_virtual(change_of_mind()) == 1


def test_waiting_for_what_nobody_will_do_is_a_deadlock_that_names_the_task() -> None:
    async def forsaken() -> None:
        task = asyncio.create_task(asyncio.Event().wait(), name="forsaken-task")
        await task

    with pytest.raises(Deadlock, match=r"at 0 s nothing is left to run.*forsaken-task"):
        run_virtual(forsaken())


def test_a_deadlock_cancels_what_is_left() -> None:
    ended: list[str] = []

    async def tidy() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("tidy")

    with pytest.raises(Deadlock):
        run_virtual(tidy())
    assert ended == ["tidy"]


def test_callbacks_without_end_do_not_hang_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_loop, "CALLBACKS_PER_INSTANT_MAX", 100)

    async def spin() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)

    with pytest.raises(StandStill, match="more than 100 callbacks"):
        run_virtual(spin())


def test_many_callbacks_over_time_are_no_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_loop, "CALLBACKS_PER_INSTANT_MAX", 100)

    async def work() -> float:
        for _ in range(1000):
            await asyncio.sleep(1)
        return now()

    assert run_virtual(work()) == 1000


def test_work_for_threads_is_done_at_once_and_raises_where_it_is_awaited() -> None:
    async def ask() -> int:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(lambda: 6 * 7)

    assert run_virtual(ask()) == 42


def test_each_run_starts_at_zero_with_nothing_left_over() -> None:
    async def leave_a_task() -> float:
        asyncio.get_running_loop().create_task(asyncio.sleep(1_000))
        return now()

    assert [run_virtual(leave_a_task()) for _ in range(2)] == [0, 0]


def test_a_subclass_may_hold_callbacks_back() -> None:
    held: list[asyncio.Handle] = []

    class Hesitant(VirtualLoop):
        def run_handle(self, handle: asyncio.Handle) -> None:
            if isinstance(handle, asyncio.TimerHandle) and not held:
                held.append(handle)
            else:
                super().run_handle(handle)

    async def wait_for_the_second() -> list[int]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        loop.call_later(1, fired.append, 1)
        loop.call_later(2, fired.append, 2)
        await asyncio.sleep(3)
        return fired

    with asyncio.Runner(loop_factory=Hesitant) as runner:
        assert runner.run(wait_for_the_second()) == [2]
