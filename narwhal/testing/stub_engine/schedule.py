"""Which faults meet a request: each counts what it matches, fires, heals, and can be lifted at any time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from narwhal.testing.stub_engine.faults import Fault, FaultKind, FaultLeg


@dataclass(slots=True, eq=False)
class Armed:
    """One fault in force. `lifted` is set once it is taken back, which frees whatever waits in it."""

    fault: Fault
    matched: int = 0
    fired: int = 0
    lifted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def healed(self) -> bool:
        """Whether it has fired as often as it was to."""
        return self.fault.times is not None and self.fired >= self.fault.times

    def meets(self, leg: FaultLeg) -> bool:
        """Count a request of `leg` and return whether the fault fires for it."""
        if self.healed or self.fault.leg not in (leg, FaultLeg.ANY):
            return False
        self.matched += 1
        due = self.matched - self.fault.skip
        if due < 1 or due % self.fault.every:
            return False
        self.fired += 1
        return True


class Plan:
    """The faults that one request meets."""

    def __init__(self, armed: Iterable[Armed] = ()) -> None:
        self._armed = {one.fault.kind: one for one in reversed(list(armed))}

    def get(self, kind: FaultKind) -> Fault | None:
        """Return the fault of `kind` that was set first, or None."""
        one = self._armed.get(kind)
        return None if one is None else one.fault

    async def until_lifted(self, kind: FaultKind) -> None:
        """Return when the fault of `kind` is taken back; at once if there is none."""
        if kind in self._armed:
            await self._armed[kind].lifted.wait()


class FaultBook:
    """The faults in force.

    `refuse`, `paused` and `other_model` are conditions of the whole engine, asked for by `standing`; the others meet
    single requests.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._armed = [Armed(fault) for fault in faults]
        self.fired: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Armed]:
        return iter(self._armed)

    def replace(self, faults: Iterable[Fault]) -> None:
        """Put exactly `faults` in force, counting from zero. Whatever waits in one that stays goes on waiting."""
        before = self._armed
        self._armed = [Armed(fault) for fault in faults]
        for old in before:
            kept = next((new for new in self._armed if new.fault == old.fault), None)
            if kept is None:
                old.lifted.set()
            else:
                kept.lifted = old.lifted

    def draw(self, leg: FaultLeg) -> Plan:
        """Count a request of `leg` against every fault and return those that fire for it."""
        firing = [one for one in self._armed if one.fault.kind not in _STANDING and one.meets(leg)]
        self.fired.update(one.fault.kind.value for one in firing)
        return Plan(firing)

    def standing(self, kind: FaultKind) -> Armed | None:
        """Return the condition of `kind` that holds for the whole engine now, or None."""
        return next((one for one in self._armed if one.fault.kind is kind and not one.healed), None)

    def refuses(self) -> bool:
        """Whether the listener is to be closed."""
        refusal = self.standing(FaultKind.REFUSE)
        return refusal is not None and refusal.fault.variant == "closed"

    def resets_connection(self) -> bool:
        """Count a new connection and return whether it is to be reset at once."""
        refusal = self.standing(FaultKind.REFUSE)
        if refusal is None or refusal.fault.variant != "rst" or not refusal.meets(FaultLeg.ANY):
            return False
        self.fired[FaultKind.REFUSE.value] += 1
        return True


_STANDING = frozenset({FaultKind.REFUSE, FaultKind.PAUSED, FaultKind.OTHER_MODEL})
