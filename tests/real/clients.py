"""Clients of the official kind, as these tests watch them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from openai import APIError, AsyncOpenAI

from tests.real.engines import MODEL

WORDS: Final = "tell me one more story about the sea and the whales that live in it "
LONG: Final = 800
"""Tokens of a stream that a test can interrupt; the model takes 1024 with its prompt."""


def fresh_prompt(*, words: int = 12) -> str:
    """Return a prompt whose KV no engine has."""
    return f"{os.urandom(8).hex()} " + WORDS * words


@dataclass(slots=True)
class Watched:
    """One streaming completion as its client sees it."""

    prompt: str = field(default_factory=fresh_prompt)
    frames: int = 0
    text: str = ""
    finish_reason: str | None = None
    usage: Any = None
    error: Exception | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def whole(self) -> bool:
        """Whether it ended as it should."""
        return self.error is None and self.finish_reason is not None

    async def run(self, client: AsyncOpenAI, *, tokens: int = LONG) -> None:
        """Stream a completion of exactly `tokens` tokens to its end, whichever that is."""
        try:
            stream = await client.completions.create(
                model=MODEL,
                prompt=self.prompt,
                max_tokens=tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                self.frames += 1
                self.begun.set()
                self.usage = chunk.usage or self.usage
                for choice in chunk.choices:
                    self.text += choice.text
                    self.finish_reason = choice.finish_reason or self.finish_reason
        except APIError as error:
            self.error = error
        finally:
            self.begun.set()


class Crowd:
    """Several streams at once. Used as a context they are under way inside it, and over after it."""

    def __init__(self, client: AsyncOpenAI, count: int, *, tokens: int = LONG) -> None:
        self.streams = [Watched(fresh_prompt(words=3)) for _ in range(count)]
        self._client = client
        self._tokens = tokens
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Sequence[Watched]:
        self._tasks = [asyncio.create_task(stream.run(self._client, tokens=self._tokens)) for stream in self.streams]
        for stream in self.streams:
            await stream.begun.wait()
        return self.streams

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._tasks)
