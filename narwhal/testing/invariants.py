"""What must be true of every history, whatever faults it holds: the invariants of the lease protocol.

| Invariant | It says |
|---|---|
| I1 | no two routers admit at one instant, admissions never go back to an older term, and no lease is granted while |
| | another router may still admit |
| I2 | granted fencing tokens strictly rise, also over restarts and loss of data |
| I3 | accepted handoffs strictly rise by (token, version), and a new active starts from the newest one |
| I4 | an engine whose drain was acknowledged gets no work until somebody orders it back, over takeovers too |
| I7 | a term that was fenced never admits again |

Source: ha.md, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from narwhal.testing.history import (
    Admitted,
    BecameActive,
    DataLost,
    DrainAcknowledged,
    Fenced,
    HandoffAccepted,
    LeaseGranted,
    Order,
    Record,
    UndrainOrdered,
)


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold, the index of the record that shows it, and why."""

    invariant: str
    index: int
    why: str


class Invariant(Protocol):
    """Reads a history from its beginning and complains."""

    def take(self, record: Record) -> Iterator[str]:
        """Take in the next record and yield what is wrong about it."""
        ...


class OneAdmits:
    """I1."""

    def __init__(self) -> None:
        self._last: Admitted | None = None

    def take(self, record: Record) -> Iterator[str]:
        """Compare each admission with the one before."""
        if isinstance(record, LeaseGranted):
            for router in record.others_held:
                yield f"the lease was granted to {record.router} while {router} may still admit"
        if not isinstance(record, Admitted):
            return
        last, self._last = self._last, record
        if last is None:
            return
        if record.token < last.token:
            yield f"{record.router} admits under {record.token} after {last.router} did under {last.token}"
        if record.router != last.router and record.token == last.token:
            yield f"{record.router} and {last.router} admit under the same token {record.token}"
        if record.router != last.router and record.at <= last.at:
            yield f"{record.router} and {last.router} admit at the same instant"


class TokensRise:
    """I2."""

    def __init__(self) -> None:
        self._highest = 0

    def take(self, record: Record) -> Iterator[str]:
        """Compare each grant with the highest before."""
        if isinstance(record, LeaseGranted):
            if record.token <= self._highest:
                yield f"token {record.token} was granted after {self._highest}"
            self._highest = max(self._highest, record.token)


class HandoffsRise:
    """I3."""

    def __init__(self) -> None:
        self._highest: Order = (0, 0)

    def take(self, record: Record) -> Iterator[str]:
        """Compare each accepted document with the highest before, and each start with what was there."""
        if isinstance(record, HandoffAccepted):
            if record.order <= self._highest:
                yield f"handoff {record.order} was accepted after {self._highest}"
            self._highest = max(self._highest, record.order)
        if isinstance(record, BecameActive) and (record.applied or (0, 0)) < (record.newest or (0, 0)):
            yield f"{record.router} became active with handoff {record.applied}, and {record.newest} was there"


class DrainsLast:
    """I4. A drain that no living router had read when the data were lost is lost with them."""

    def __init__(self) -> None:
        self._drained: dict[str, DrainAcknowledged] = {}
        self._data_lost_at = -1.0

    def take(self, record: Record) -> Iterator[str]:
        """Follow drains, and look at where each admission goes."""
        match record:
            case DrainAcknowledged():
                self._drained[record.engine] = record
            case UndrainOrdered():
                self._drained.pop(record.engine, None)
            case DataLost():
                self._data_lost_at = record.at
            case BecameActive():
                self._forget_what_was_lost(record)
            case Admitted():
                for engine in record.engines:
                    if engine in self._drained:
                        since = self._drained[engine].at
                        yield f"{record.router} places work on {engine}, although its drain stands since {since:.4f}"
            case _:
                pass

    def _forget_what_was_lost(self, start: BecameActive) -> None:
        for engine, drain in list(self._drained.items()):
            unknown = start.applied is None or start.applied < drain.order
            if unknown and drain.at <= self._data_lost_at:
                del self._drained[engine]


class FencesHold:
    """I7."""

    def __init__(self) -> None:
        self._fenced: set[tuple[str, int]] = set()

    def take(self, record: Record) -> Iterator[str]:
        """Look for admissions of terms that are over."""
        if isinstance(record, Fenced):
            self._fenced.add((record.router, record.token))
        if isinstance(record, Admitted) and (record.router, record.token) in self._fenced:
            yield f"{record.router} admits under {record.token}, which it fenced"


INVARIANTS: Final[dict[str, type[Invariant]]] = {
    "I1": OneAdmits,
    "I2": TokensRise,
    "I3": HandoffsRise,
    "I4": DrainsLast,
    "I7": FencesHold,
}


def check(records: Sequence[Record]) -> list[Violation]:
    """Return every violation in `records`, oldest first."""
    invariants = {name: kind() for name, kind in INVARIANTS.items()}
    return [
        Violation(name, index, why)
        for index, record in enumerate(records)
        for name, invariant in invariants.items()
        for why in invariant.take(record)
    ]
