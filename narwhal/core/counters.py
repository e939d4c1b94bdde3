"""Tallies that only grow, carried in the handoff so that a takeover does not reset them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class CounterName(StrEnum):
    """What is counted, over the life of the cluster."""

    REQUESTS_ADMITTED = "requests_admitted"
    REQUESTS_SERVED = "requests_served"
    REQUESTS_FAILED = "requests_failed"
    EJECTIONS = "ejections"
    READMISSIONS = "readmissions"
    HOLDS_PLACED = "holds_placed"
    PROBES_FAILED = "probes_failed"
    TAKEOVERS = "takeovers"
    MONITOR_PASSES = "monitor_passes"
    MONITOR_STAGE_FAILURES = "monitor_stage_failures"


class Counters:
    """The tallies of one control plane."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: dict[str, int] = dict.fromkeys(CounterName, 0)

    def add(self, name: CounterName, amount: int = 1) -> None:
        """Add `amount` to one tally."""
        self.values[name] += amount

    def restore(self, values: Mapping[str, int]) -> None:
        """Take over the tallies of a handoff; a tally never goes back, an unknown one is kept."""
        for name, value in values.items():
            self.values[name] = max(self.values.get(name, 0), value)
