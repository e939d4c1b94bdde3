"""The Redis of a simulated world, and each router's way to it over the simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from narwhal.core.handoff import HandoffDocument
from narwhal.core.lease import AcquireAnswer, Granted
from narwhal.errors import NarwhalError, StoreUnavailable
from narwhal.testing.history import DataLost, HandoffAccepted, History, LeaseGranted
from narwhal.testing.memory_store import MemoryLink, MemoryRedis
from narwhal.testing.network import Deliver, Network

T = TypeVar("T")

REDIS = "redis"


class WorldRedis(MemoryRedis):
    """A Redis that keeps the history, and may hang or be down. `who_may_admit` names the routers that still hold."""

    def __init__(self, history: History, who_may_admit: Callable[[], list[str]]) -> None:
        super().__init__(clock_offset_s=1_000.0)
        self._history = history
        self._who_may_admit = who_may_admit
        self._waiting: list[Deliver] | None = None
        self.down = False

    def acquire(self, candidate: Any, **options: Any) -> AcquireAnswer:
        """Answer ACQUIRE, and note a grant with who could still admit at this instant."""
        answer = super().acquire(candidate, **options)
        if isinstance(answer, Granted) and answer.fresh:
            others = tuple(name for name in self._who_may_admit() if name != answer.record.router)
            self._history.add(LeaseGranted(_now(), answer.record.router, answer.record.token, others))
        return answer

    def put_handoff(self, document: HandoffDocument) -> None:
        """Answer PUT_HANDOFF, and note a document that was taken."""
        before = self.newest_handoff
        super().put_handoff(document)
        if self.newest_handoff != before:
            self._history.add(HandoffAccepted(_now(), document.order))

    def flush(self) -> None:
        """Lose all data."""
        super().flush()
        self._history.add(DataLost(_now()))

    @property
    def newest_handoff(self) -> tuple[int, int] | None:
        """The order of the mirrored document."""
        return self._data.handoff.order if self._data.handoff is not None else None

    def hang(self) -> None:
        """Answer nothing until `resume`; the clock goes on, and commands wait."""
        self._waiting = self._waiting if self._waiting is not None else []

    def resume(self) -> None:
        """Carry out what waited, in its order."""
        waiting, self._waiting = self._waiting or [], None
        for command in waiting:
            command()

    def arrive(self, command: Deliver) -> None:
        """Carry out a command that came over the network, now or when this server goes on."""
        if self._waiting is not None:
            self._waiting.append(command)
        else:
            command()


class WorldLink(MemoryLink):
    """One router's way to Redis: a command may arrive although its sender has given up, and an answer may not."""

    redis: WorldRedis

    def __init__(self, redis: WorldRedis, network: Network, host: str, *, op_timeout_s: float) -> None:
        super().__init__(redis, op_timeout_s=op_timeout_s)
        self._network = network
        self._host = host

    async def run(self, what: str, command: Callable[[], T]) -> T:
        """Return the answer of `command`. Raises what it raises, and StoreUnavailable when no answer came in time."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._network.send(self._host, REDIS, lambda: self.redis.arrive(lambda: self._carry_out(command, answer)))
        try:
            async with asyncio.timeout(self.op_timeout_s):
                return await answer
        except TimeoutError as error:
            raise StoreUnavailable(f"{what}: Redis gave no answer within {self.op_timeout_s:g} s") from error

    def _carry_out(self, command: Callable[[], T], answer: asyncio.Future[T]) -> None:
        if self.redis.down:
            self._reply(answer, error=StoreUnavailable("Redis refuses connections"))
            return
        try:
            result = command()
        except NarwhalError as error:
            self._reply(answer, error=error)
        else:
            self._reply(answer, result=result)

    def _reply(self, answer: asyncio.Future[T], *, result: Any = None, error: NarwhalError | None = None) -> None:
        if self._replies_to_lose:
            self._replies_to_lose -= 1
            return
        self._network.send(REDIS, self._host, lambda: _settle(answer, result, error))


def _settle(answer: asyncio.Future[Any], result: Any, error: NarwhalError | None) -> None:
    """Hand the answer over, unless whoever asked has given up."""
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _now() -> float:
    return asyncio.get_running_loop().time()
