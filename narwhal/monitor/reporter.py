"""The one way into the core for whatever happened: apply, log each decision, carry it out.

Serving and the stages report events here. Every change of state has one log line of one shape, and a probe that the
core ordered is started before anybody can place new work.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Final

import structlog

from narwhal.core.control_plane import ControlPlane
from narwhal.core.events import (
    Decision,
    EngineEjected,
    EvidenceCleared,
    FleetEvent,
    MonitoringDegraded,
    PairParted,
    ProbeJudged,
    ProbeOrdered,
)
from narwhal.core.vocabulary import ProbeResult

log = structlog.get_logger()

WARNINGS: Final = (EngineEjected, MonitoringDegraded, PairParted)
QUIET: Final = (EvidenceCleared, ProbeOrdered)


def event_name(decision: Decision) -> str:
    """Return the log event of `decision`: `EngineEjected` is `engine_ejected`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(decision).__name__).lower()


class Reporter:
    """Applies events to the control plane and carries the decisions out."""

    def __init__(self, plane: ControlPlane, *, start_probe: Callable[[ProbeOrdered], None]) -> None:
        self._plane = plane
        self._start_probe = start_probe
        self._watchers: list[Callable[[Decision], None]] = []
        self.changed = asyncio.Event()

    def watch(self, watcher: Callable[[Decision], None]) -> None:
        """Call `watcher` with every decision from now on; it must not block."""
        self._watchers.append(watcher)

    def report(self, event: FleetEvent) -> None:
        """Tell the core what happened, now."""
        decisions = self._plane.apply(event, now=asyncio.get_running_loop().time())
        if decisions:
            self.carry_out(decisions)

    def carry_out(self, decisions: Iterable[Decision]) -> None:
        """Log each decision, tell the watchers, start the probes, and mark the control plane as changed."""
        for decision in decisions:
            self._write(decision)
            for watcher in self._watchers:
                watcher(decision)
            if isinstance(decision, ProbeOrdered):
                self._start_probe(decision)
            if not isinstance(decision, QUIET):
                self.changed.set()

    def _write(self, decision: Decision) -> None:
        facts = {field.name: getattr(decision, field.name) for field in fields(decision)}
        failed = isinstance(decision, ProbeJudged) and decision.result is ProbeResult.FAILED
        write = log.warning if failed or isinstance(decision, WARNINGS) else log.info
        write(event_name(decision), **facts)
