"""Counters and histograms for the request path: one thread owns them, so they need no locks and no children to look up.

They are collectors of prometheus-client, which writes them out; only the counting is ours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Tally(Collector):
    """Counts per combination of label values."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: defaultdict[tuple[str, ...], int] = defaultdict(int)

    def add(self, *values: str) -> None:
        """Count one more for these label values."""
        self._counts[values] += 1

    def describe(self) -> list[Metric]:
        """Return the name without any sample."""
        return [CounterMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        """Yield the counts as they are now."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(list(values), count)
        yield family


class Timing(Collector):
    """Times (seconds) in buckets, per value of at most one label; a bucket counts what is not above its bound."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], label: str | None = None) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._names = [*map(str, bounds), "+Inf"]
        self._labels = [label] if label is not None else []
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(self._names))
        self._sums: defaultdict[str, float] = defaultdict(float)

    def observe(self, seconds: float, value: str = "") -> None:
        """Take in one time."""
        self._counts[value][bisect_left(self._bounds, seconds)] += 1
        self._sums[value] += seconds

    def describe(self) -> list[Metric]:
        """Return the name without any sample."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        """Yield the buckets as they are now, cumulated."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for value, counts in self._counts.items():
            total, buckets = 0, []
            for name, count in zip(self._names, counts, strict=True):
                total += count
                buckets.append((name, float(total)))
            family.add_metric([value] if self._labels else [], buckets=buckets, sum_value=self._sums[value])
        yield family
