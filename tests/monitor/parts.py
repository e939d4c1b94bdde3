"""A router's monitor over engines and stores in memory, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from narwhal.core.events import Decision, FleetEvent
from narwhal.core.lease import LeaseRecord
from narwhal.core.vocabulary import RouterRole, Stage
from narwhal.monitor.handoff_writer import HandoffWriter
from narwhal.monitor.loop import MonitorLoop
from narwhal.monitor.probe_runner import ProbeRunner
from narwhal.monitor.readmission_runner import ReadmissionRunner
from narwhal.monitor.reporter import Reporter
from narwhal.monitor.stages import Stages
from narwhal.testing.memory_engines import MemoryEngines
from tests.core.fleets import entries
from tests.ha.parts import A, Host, Shared, make_candidate, now, plane_of


class Monitored:
    """Router A's monitor; `decisions` are those that were carried out."""

    def __init__(self, **sections: dict[str, Any]) -> None:
        self.plane = plane_of(A, **sections)
        self.engines = MemoryEngines((entry.id, entry.role) for entry in entries())
        self.shared = Shared()
        self.link = self.shared.link()
        self.host = Host()
        self.probes = ProbeRunner(self.plane, self.engines)
        self.reporter = Reporter(self.plane, start_probe=self.probes.start)
        self.probes.report = self.reporter.report
        self.readmission = ReadmissionRunner(self.plane, self.engines, self.reporter.report)
        self.writer = HandoffWriter(
            self.plane, file=self.host.file, mirror=self.shared.mirror(self.link), clock=now, wall=lambda: 1e9 + now()
        )
        self.stages = Stages(self.plane, self.engines, self.reporter, self.readmission, self.writer)
        self.loop = MonitorLoop(self.plane, self.stages, self.reporter)
        self.decisions: list[Decision] = []
        self.reporter.watch(self.decisions.append)

    async def serve(self) -> LeaseRecord:
        """Make the router active, under a lease that a test may let run out."""
        record = await self.shared.grant(make_candidate(A, ttl_s=100_000.0))
        self.plane.tenure.granted(record, sent_at=now())
        self.plane.role = RouterRole.ACTIVE
        return record

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """The loop, at work."""
        task = asyncio.create_task(self.loop.run(), name="monitor")
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task})
            await self.probes.cancel()

    async def run_stage(self, stage: Stage) -> None:
        """Run one stage alone."""
        await dict(self.stages.due(now=now()))[stage]()

    def report(self, *events: FleetEvent) -> None:
        """Tell the core what happened."""
        for event in events:
            self.reporter.report(event)

    def decided(self, kind: type[Decision]) -> list[Decision]:
        """The decisions of one kind."""
        return [decision for decision in self.decisions if isinstance(decision, kind)]
