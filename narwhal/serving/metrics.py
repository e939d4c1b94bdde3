"""Metrics of requests and of the fleet, in Prometheus' text format.

Requests are counted as they end; what the control plane knows is read when somebody asks. Labels are bounded: engine
ids, roles, classes and words of closed lists; never a request, a client or an address.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from narwhal.core.control_plane import ControlPlane
from narwhal.core.vocabulary import Leg
from narwhal.ports import Clock, EngineData
from narwhal.serving.decision_metrics import DecisionMetrics
from narwhal.serving.fleet_metrics import FleetCollector
from narwhal.serving.tallies import Tally, Timing

Kept = TypeVar("Kept", Tally, Timing)

TTFT_BUCKETS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
DURATION_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
CHUNK_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
AGE_BUCKETS: Final = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0)


class RequestFigures(NamedTuple):
    """What is measured of one finished request; times in seconds, None where it never came to that."""

    endpoint: str
    outcome: str
    duration_s: float
    ttft_s: float | None = None
    chunk_s: float | None = None


class Metrics:
    """The metrics of one router, in a registry of their own; others may register their collectors there."""

    def __init__(self, plane: ControlPlane, *, clock: Clock) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(FleetCollector(plane, clock))
        self._requests = self._kept(Tally("narwhal_requests", "Finished requests", ("endpoint", "outcome")))
        self._duration = self._kept(
            Timing("narwhal_request_duration_seconds", "From head to last byte", DURATION_BUCKETS, "endpoint")
        )
        self._ttft = self._kept(Timing("narwhal_ttft_seconds", "To the first token of a stream", TTFT_BUCKETS))
        self._chunk = self._kept(
            Timing("narwhal_time_per_output_chunk_seconds", "Mean time between chunks of a stream", CHUNK_BUCKETS)
        )
        self._legs = self._kept(Timing("narwhal_leg_duration_seconds", "Time of one leg", DURATION_BUCKETS, "role"))
        self._tickets = self._kept(Tally("narwhal_kv_tickets", "KV tickets by what became of them", ("result",)))
        self._ticket_age = self._kept(
            Timing("narwhal_kv_ticket_age_seconds", "Age of a KV ticket when it was presented", AGE_BUCKETS)
        )
        self.decision_made = DecisionMetrics(self.registry).decision_made

    def watch_pool(self, pool: EngineData) -> None:
        """Show how many slots of the data pool are in use, and how many there are."""
        used = Gauge("narwhal_data_slots_in_use", "Slots of the data pool in use", registry=self.registry)
        used.set_function(lambda: pool.in_use)
        Gauge("narwhal_data_slots", "Slots of the data pool", registry=self.registry).set(pool.capacity)

    def request_finished(self, figures: RequestFigures) -> None:
        """Count one finished request."""
        self._requests.add(figures.endpoint, figures.outcome)
        self._duration.observe(figures.duration_s, figures.endpoint)
        if figures.ttft_s is not None:
            self._ttft.observe(figures.ttft_s)
        if figures.chunk_s is not None:
            self._chunk.observe(figures.chunk_s)

    def leg_finished(self, leg: Leg, duration_s: float) -> None:
        """Measure one leg, however it ended."""
        self._legs.observe(duration_s, leg)

    def ticket_ended(self, fate: str, age_s: float | None) -> None:
        """Count one KV ticket by its fate; `age_s` is how old it was when it was presented, if it ever was."""
        self._tickets.add(fate)
        if age_s is not None:
            self._ticket_age.observe(age_s)

    def _kept(self, collector: Kept) -> Kept:
        self.registry.register(collector)
        return collector

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer a scrape."""
        return web.Response(body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
