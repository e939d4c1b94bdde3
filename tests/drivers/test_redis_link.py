"""A command to Redis ends when it is told to, whatever the library does with the request to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from narwhal.store.connection import RedisLink


class Deaf:
    """A client that answers when it is cancelled, as `asyncio.wait_for` of Python 3.11 does at an unlucky moment."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.response_callbacks: dict[str, Callable[..., Any]] = {}
        self.asked = asyncio.Event()

    async def execute_command(self, *_: Any) -> bytes:
        self.asked.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if self.error is not None:
                raise self.error from None
            return b"answered all the same"
        raise AssertionError("nobody cancelled it")


def link_to(client: Deaf, *, op_timeout_s: float) -> RedisLink:
    return RedisLink(cast(Redis, client), address="nowhere", op_timeout_s=op_timeout_s)


@pytest.mark.parametrize("error", [None, ConnectionResetError("while it disconnected")])
async def test_a_cancelled_command_stays_cancelled_when_the_library_swallows_the_cancellation(
    error: Exception | None,
) -> None:
    client = Deaf(error)
    command = asyncio.create_task(link_to(client, op_timeout_s=30).run("GET", "key"))
    await client.asked.wait()
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command


async def test_an_answer_that_comes_with_the_time_out_is_an_answer() -> None:
    assert await link_to(Deaf(), op_timeout_s=0.01).run("GET", "key") == b"answered all the same"
