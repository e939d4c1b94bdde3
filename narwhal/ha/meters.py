"""What the pair measures of itself: the lease, the handoff, the store behind both, and the watch on the active.

The protocol code is not touched: its ports are wrapped, and what the control plane knows is read at scrape time.
Source: decision 33.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from narwhal.core.control_plane import ControlPlane
from narwhal.core.counters import CounterName
from narwhal.core.handoff import HandoffDocument
from narwhal.core.lease import AcquireAnswer, Claim, LeaseObservation, LeaseRecord, RenewAnswer
from narwhal.core.vocabulary import FencingToken, RouterId
from narwhal.errors import HandoffRefused, NarwhalError
from narwhal.ports import Clock, HandoffStore, LeaseStore, Member, PeerLook, RouterPeer

OP_BUCKETS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
PHASE_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class HaMeters:
    """The instruments. `clock` is the lease clock, and measures how long store operations take."""

    def __init__(self, plane: ControlPlane, registry: CollectorRegistry, *, clock: Clock) -> None:
        self.clock = clock
        registry.register(LeaseCollector(plane, clock))
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=OP_BUCKETS)
        self.op_seconds = histogram("narwhal_redis_op_seconds", "Time of one answered store operation", ["op"])
        self.op_failures = counter("narwhal_redis_op_failures", "Store operations without an answer", ["op", "error"])
        self.write_seconds = histogram("narwhal_handoff_write_seconds", "Time of one handoff write", ["target"])
        self.writes = counter("narwhal_handoff_writes", "Handoff writes", ["target", "result"])
        self.signs = counter("narwhal_active_signs", "What looks at the active's /ready have shown", ["sign"])
        self._phases = Histogram(
            "narwhal_takeover_seconds",
            "Time of a takeover's phases",
            ["phase"],
            registry=registry,
            buckets=PHASE_BUCKETS,
        )
        self.size = Gauge("narwhal_handoff_bytes", "Size of the newest written handoff", registry=registry)
        self._written_at: float | None = None
        age = Gauge("narwhal_handoff_age_seconds", "Time since the last write; NaN before the first", registry=registry)
        age.set_function(lambda: float("nan") if self._written_at is None else clock() - self._written_at)

    @contextmanager
    def timed(self, op: str) -> Iterator[None]:
        """Measure one store operation."""
        began = self.clock()
        try:
            yield
        except NarwhalError as error:
            self.op_failures.labels(op, type(error).__name__).inc()
            raise
        self.op_seconds.labels(op).observe(self.clock() - began)

    def took(self, phase: str, seconds: float) -> None:
        """Note how long one phase of a takeover took."""
        self._phases.labels(phase).observe(seconds)

    def wrote(self, document: HandoffDocument) -> None:
        """Note that `document` is the newest written one."""
        self._written_at = self.clock()
        self.size.set(len(document.encode()))


class LeaseCollector(Collector):
    """The lease as this process believes in it, and what became of its terms."""

    def __init__(self, plane: ControlPlane, clock: Clock) -> None:
        self._plane = plane
        self._clock = clock

    def describe(self) -> list[Metric]:
        """Return nothing: the names are known when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this instant."""
        plane, now = self._plane, self._clock()
        tenure = plane.tenure
        solo = tenure.valid_until == inf
        yield GaugeMetricFamily("narwhal_lease_held", "Whether this router may admit", value=float(tenure.held(now)))
        yield GaugeMetricFamily("narwhal_lease_token", "Fencing token of the newest term here", value=tenure.token)
        yield GaugeMetricFamily(
            "narwhal_lease_remaining_seconds",
            "Time left until the local deadline",
            value=inf if solo else tenure.remaining_s(now),
        )
        yield CounterMetricFamily("narwhal_fencings", "Terms of this process that ended", value=tenure.fencings)
        takeovers = plane.counters.values[CounterName.TAKEOVERS]
        yield CounterMetricFamily("narwhal_takeovers", "Takeovers in the life of the cluster", value=takeovers)
        yield GaugeMetricFamily("narwhal_handoff_version", "Newest handoff version here", value=plane.version)
        mode = GaugeMetricFamily("narwhal_ha_mode", "How this router is kept from being two", labels=["mode"])
        for word in ("lease", "solo"):
            mode.add_metric([word], float((word == "solo") == solo))
        yield mode


class MeteredLeaseStore:
    """A `LeaseStore` of which every operation is timed."""

    def __init__(self, store: LeaseStore, meters: HaMeters) -> None:
        self._store = store
        self._timed = meters.timed

    async def observe(self) -> LeaseObservation:
        """See `LeaseStore.observe`."""
        with self._timed("observe"):
            return await self._store.observe()

    async def acquire(
        self,
        candidate: LeaseRecord,
        *,
        floor: FencingToken,
        epoch: str | None,
        after: FencingToken | None = None,
        deposing: LeaseRecord | None = None,
    ) -> AcquireAnswer:
        """See `LeaseStore.acquire`."""
        with self._timed("acquire"):
            return await self._store.acquire(candidate, floor=floor, epoch=epoch, after=after, deposing=deposing)

    async def renew(self, record: LeaseRecord) -> RenewAnswer:
        """See `LeaseStore.renew`."""
        with self._timed("renew"):
            return await self._store.renew(record)

    async def release(self, record: LeaseRecord, *, successor: RouterId | None) -> bool:
        """See `LeaseStore.release`."""
        with self._timed("release"):
            return await self._store.release(record, successor=successor)

    async def claim(self, expected: LeaseRecord, claim: Claim) -> bool:
        """See `LeaseStore.claim`."""
        with self._timed("claim"):
            return await self._store.claim(expected, claim)

    async def announce(self, member: Member) -> None:
        """See `LeaseStore.announce`."""
        with self._timed("announce"):
            await self._store.announce(member)

    async def members(self) -> Sequence[Member]:
        """See `LeaseStore.members`."""
        with self._timed("members"):
            return await self._store.members()

    async def wait_for_event(self, *, timeout_s: float) -> None:
        """See `LeaseStore.wait_for_event`; a wait is not an operation that could be slow."""
        await self._store.wait_for_event(timeout_s=timeout_s)


class MeteredHandoffStore:
    """A `HandoffStore` of which every write is timed and counted. `target` is `file` or `mirror`."""

    def __init__(self, store: HandoffStore, meters: HaMeters, *, target: str) -> None:
        self._store = store
        self._meters = meters
        self._target = target

    async def put(self, document: HandoffDocument) -> None:
        """See `HandoffStore.put`."""
        began = self._meters.clock()
        result = "failed"
        try:
            await self._store.put(document)
            result = "written"
        except HandoffRefused:
            result = "refused"
            raise
        finally:
            self._meters.writes.labels(self._target, result).inc()
        self._meters.write_seconds.labels(self._target).observe(self._meters.clock() - began)
        self._meters.wrote(document)

    async def get(self) -> HandoffDocument | None:
        """See `HandoffStore.get`."""
        return await self._store.get()


class MeteredPeer:
    """A `RouterPeer` of which every look is counted by the sign that it showed."""

    def __init__(self, peer: RouterPeer, meters: HaMeters) -> None:
        self._peer = peer
        self._signs = meters.signs

    async def look(self, url: str, *, timeout_s: float) -> PeerLook:
        """See `RouterPeer.look`."""
        look = await self._peer.look(url, timeout_s=timeout_s)
        self._signs.labels(look.sign).inc()
        return look
