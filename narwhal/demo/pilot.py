"""An impatient client: from the kill on it sends a request to the router that is left, until that one serves it.

It ends the measurement of the takeover, undelayed by the load's own clients, and it sees what a router says to those
who come too early: nothing but a 503 that promises that no engine has seen the request.
"""

from __future__ import annotations

import asyncio
from typing import Final

from narwhal.demo.wire import Answer, Door

EVERY_S: Final = 0.02
TIMEOUT_S: Final = 10.0


class Pilot:
    """`refusals` counts the 503s that may be repeated; `surprises` holds every other answer that is not a success."""

    def __init__(self, url: str, *, model: str) -> None:
        self.refusals = 0
        self.surprises: list[str] = []
        self._door = Door(url)
        self._request = {"model": model, "prompt": "The sea is", "max_tokens": 1}

    async def run(self) -> None:
        """Ask until a request is served, or until an answer was a surprise."""
        try:
            while True:
                if await self._try():
                    return
                await asyncio.sleep(EVERY_S)
        finally:
            self._door.close()

    async def _try(self) -> bool:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._door.post("/v1/completions", self._request)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            self.surprises.append(f"pilot: {type(error).__name__}: {error}")
            return True
        return self._judge(answer)

    def _judge(self, answer: Answer) -> bool:
        if answer.status == 200:
            return True
        if answer.status == 503 and answer.headers.get("x-narwhal-not-executed") == "1":
            self.refusals += 1
            return False
        self.surprises.append(f"pilot: status {answer.status}: {answer.document}")
        return True
