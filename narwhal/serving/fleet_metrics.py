"""What the control plane knows, as metrics that are computed when somebody asks: nothing to keep in step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from narwhal import __version__
from narwhal.core.control_plane import ControlPlane
from narwhal.core.vocabulary import FailureClass, HoldKind, RouterRole
from narwhal.ports import Clock
from narwhal.serving.status import engine_state

ENGINE_STATES: Final = ("eligible", "ejected", *HoldKind)


class FleetCollector(Collector):
    """Readiness, role, monitoring and every engine's state, in flight work and evidence."""

    def __init__(self, plane: ControlPlane, clock: Clock) -> None:
        self._plane = plane
        self._clock = clock

    def describe(self) -> list[Metric]:
        """Return nothing: the names are known when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this instant."""
        yield from self._router()
        yield from self._monitoring()
        yield from self._engines()
        for name, value in self._plane.counters.values.items():
            yield CounterMetricFamily(f"narwhal_cluster_{name}", "Tally carried in the handoff", value=value)

    def _router(self) -> Iterator[Metric]:
        plane = self._plane
        answer = plane.readiness(now=_now(), lease_now=self._clock())
        yield GaugeMetricFamily("narwhal_ready", "Whether this router admits", value=float(answer.ready))
        yield GaugeMetricFamily(
            "narwhal_control_ready", "Whether this router's own control is fit", value=float(answer.control_ready)
        )
        role = GaugeMetricFamily("narwhal_role", "What this router is to the pair", labels=["role"])
        for word in RouterRole:
            role.add_metric([word], float(plane.role is word))
        yield role
        build = GaugeMetricFamily("narwhal_build_info", "Version of this router", labels=["version", "router"])
        build.add_metric([__version__, plane.config.router.id], 1)
        yield build

    def _monitoring(self) -> Iterator[Metric]:
        monitoring = self._plane.monitoring
        yield GaugeMetricFamily("narwhal_monitor_failure_streak", "Failed passes in a row", value=monitoring.streak)
        yield CounterMetricFamily("narwhal_monitor_passes", "Monitor passes", value=monitoring.passes)
        errors = CounterMetricFamily("narwhal_monitor_stage_errors", "Failed stages", labels=["stage", "class"])
        for (stage, error_class), count in monitoring.failures.items():
            errors.add_metric([stage, error_class], count)
        yield errors

    def _engines(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "narwhal_engine_state", "1 for the state it is in", labels=["engine", "role", "state"]
        )
        inflight = GaugeMetricFamily("narwhal_inflight", "Legs in flight", labels=["engine", "role"])
        evidence = GaugeMetricFamily("narwhal_evidence", "Current failure streak", labels=["engine", "class"])
        now = _now()
        for engine in self._plane.fleet.engines.values():
            standing = engine_state(engine, now=now)
            for word in ENGINE_STATES:
                state.add_metric([engine.id, engine.role, word], float(word == standing))
            inflight.add_metric([engine.id, engine.role], engine.resident)
            for failure_class in FailureClass:
                evidence.add_metric([engine.id, failure_class], engine.streaks.longest(failure_class))
        yield from (state, inflight, evidence)
        apart = GaugeMetricFamily("narwhal_pairs_apart", "1 for a pair kept apart", labels=["prefill", "decode"])
        for pair in self._plane.fleet.pairs.apart:
            apart.add_metric(list(pair), 1)
        yield apart


def _now() -> float:
    return asyncio.get_running_loop().time()
