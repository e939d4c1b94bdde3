"""The network of a simulated world: every edge has two directions, each with its own faults.

What is sent into a cut direction is lost, or comes out when the cut is healed, as a kernel that keeps retransmitting
does: also what its sender has long given up on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Final

from narwhal.testing.processes import process_loop

DELAY_S: Final = (0.0002, 0.003)
"""One way, while all is well."""

Edge = tuple[str, str]
Deliver = Callable[[], None]


class Network:
    """Carries messages between named hosts. Seeded, so that a run can be repeated."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._cut: set[Edge] = set()
        self._slow: dict[Edge, float] = {}
        self._stuck: list[tuple[Edge, Deliver]] = []

    def send(self, source: str, target: str, deliver: Deliver) -> None:
        """Call `deliver` in the world outside when the message arrives, if it does."""
        edge = (source, target)
        if edge in self._cut:
            if self._random.random() < 0.5:
                self._stuck.append((edge, deliver))
            return
        delay_s = self._random.uniform(*DELAY_S) + self._random.uniform(0, self._slow.get(edge, 0.0))
        process_loop().call_outside(delay_s, deliver)

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing gets from `source` to `target` now."""
        return (source, target) in self._cut

    def cut(self, source: str, target: str) -> None:
        """Let nothing more through in this direction."""
        self._cut.add((source, target))

    def heal(self, source: str, target: str) -> None:
        """Let everything through again, and deliver what got stuck."""
        edge = (source, target)
        self._cut.discard(edge)
        self._slow.pop(edge, None)
        stuck, self._stuck = self._stuck, [item for item in self._stuck if item[0] != edge]
        for item_edge, deliver in stuck:
            if item_edge == edge:
                process_loop().call_outside(self._random.uniform(*DELAY_S), deliver)

    def heal_all(self, edges: Iterable[Edge]) -> None:
        """Heal each of `edges`."""
        for edge in edges:
            self.heal(*edge)

    def slow(self, source: str, target: str, *, up_to_s: float) -> None:
        """Let each message in this direction take up to `up_to_s` longer."""
        self._slow[source, target] = up_to_s

    def faults(self) -> Iterator[Edge]:
        """Every direction that is cut or slow now."""
        yield from sorted({*self._cut, *self._slow})
