"""What happened in a pair, in order: the records that the invariants of `narwhal.testing.invariants` are proven from.

Instants are those of one clock that all records share. A record is made at the moment of the decision.
Source: ha.md, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

Order = tuple[int, int]

RECORDS_SHOWN: Final = 40


@dataclass(frozen=True, slots=True)
class Admitted:
    """A router took a request under `token` and placed it on `engines`."""

    at: float
    router: str
    token: int
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """The store granted a new term; `others_held` names routers that could still admit at this instant."""

    at: float
    router: str
    token: int
    others_held: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fenced:
    """A router ended its term under `token`."""

    at: float
    router: str
    token: int
    reason: str


@dataclass(frozen=True, slots=True)
class BecameActive:
    """A router opened admission; `applied` is the handoff that it started from, `newest` the one in the mirror."""

    at: float
    router: str
    token: int
    applied: Order | None
    newest: Order | None


@dataclass(frozen=True, slots=True)
class HandoffAccepted:
    """The mirror took a document."""

    at: float
    order: Order


@dataclass(frozen=True, slots=True)
class DrainAcknowledged:
    """A router told an operator that the drain of `engine` is in force; it is in the handoff `order`."""

    at: float
    router: str
    engine: str
    order: Order


@dataclass(frozen=True, slots=True)
class UndrainOrdered:
    """An operator asked to have `engine` back; from here on either answer is right."""

    at: float
    engine: str


@dataclass(frozen=True, slots=True)
class DataLost:
    """The store lost its data: what no living router had read of it is lost with it."""

    at: float


@dataclass(frozen=True, slots=True)
class Noted:
    """Anything else worth seeing in a report: a fault, its end, a start."""

    at: float
    what: str


Record = (
    Admitted
    | LeaseGranted
    | Fenced
    | BecameActive
    | HandoffAccepted
    | DrainAcknowledged
    | UndrainOrdered
    | DataLost
    | Noted
)


class History:
    """The records, oldest first."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(self, record: Record) -> None:
        """Append `record`; time must not go back."""
        assert not self.records or record.at >= self.records[-1].at, "the history's clock went back"
        self.records.append(record)

    def around(self, index: int) -> str:
        """Return the records before and at `index` for a report, with runs of admissions shortened."""
        lines: list[str] = []
        for record in reversed(self.records[: index + 1]):
            line = _line(record)
            if isinstance(record, Admitted) and lines and lines[-1].split(" ", 1)[1:] == line.split(" ", 1)[1:]:
                continue
            lines.append(line)
            if len(lines) == RECORDS_SHOWN:
                break
        return "\n".join(reversed(lines))


def _line(record: Record) -> str:
    match record:
        case Admitted():
            return f"{record.at:9.4f} {record.router} admits under {record.token} on {', '.join(record.engines)}"
        case Noted():
            return f"{record.at:9.4f} {record.what}"
        case _:
            facts = ", ".join(f"{name}={getattr(record, name)!r}" for name in record.__slots__ if name != "at")
            return f"{record.at:9.4f} {type(record).__name__}: {facts}"
