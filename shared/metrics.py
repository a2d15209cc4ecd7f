"""Counters, gauges and histograms of one process, and the Prometheus page made of all processes' snapshots.

Recording is a plain attribute update, cheap enough for a step's hot path; ``prometheus_client`` only formats the page.
Each process snapshots its registry into its heartbeat, and a gateway renders the snapshots of all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Labels = tuple[str, ...]


class Counter:
    """A sum that only grows, per label values."""

    def __init__(self, help: str, labels: Sequence[str] = ()) -> None:
        self.help, self.labels = help, tuple(labels)
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def inc(self, amount: float = 1.0, labels: Labels = ()) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount


class Gauge:
    """A value of now, per label values. Over processes it is summed."""

    def __init__(self, help: str, labels: Sequence[str] = ()) -> None:
        self.help, self.labels = help, tuple(labels)
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def set(self, value: float, labels: Labels = ()) -> None:
        self.values[labels] = value


class Histogram:
    """Counts of observations by upper bound (the last, implicit bound is +Inf), and their sum."""

    def __init__(self, help: str, buckets: Sequence[float]) -> None:
        self.help, self.buckets = help, tuple(buckets)
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.buckets, value)] += count
        self.total += value * count


T = TypeVar("T", Counter, Gauge, Histogram)


class Registry:
    """The metrics of one process, by name. Names carry their prefix (``vllm:``, ``quire:``), without ``_total``."""

    def __init__(self) -> None:
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return self._add(name, Counter(help, labels))

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        return self._add(name, Gauge(help, labels))

    def histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return self._add(name, Histogram(help, buckets))

    def _add(self, name: str, metric: T) -> T:
        if name in self._metrics:
            raise ValueError(f"metric {name} exists already")
        self._metrics[name] = metric
        return metric

    def snapshot(self) -> dict[str, Any]:
        """All values as plain lists, ready for the wire: name → [type, help, labels or buckets, series]."""
        page: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            if isinstance(metric, Histogram):
                page[name] = ["histogram", metric.help, list(metric.buckets), [list(metric.counts), metric.total]]
            else:
                kind = "counter" if isinstance(metric, Counter) else "gauge"
                series = [[list(labels), value] for labels, value in metric.values.items()]
                page[name] = [kind, metric.help, list(metric.labels), series]
        return page


def render(snapshots: Iterable[dict[str, Any]], constant_labels: dict[str, str]) -> bytes:
    """The Prometheus text page of the sum of ``snapshots``, every series carrying ``constant_labels``."""
    merged: dict[str, list[Any]] = {}
    for snapshot in snapshots:
        for name, (kind, help, shape, series) in snapshot.items():
            if name not in merged:
                merged[name] = [kind, help, shape, {} if kind != "histogram" else [[0] * len(series[0]), 0.0]]
            into = merged[name][3]
            if kind == "histogram":
                into[0] = [a + b for a, b in zip(into[0], series[0], strict=True)]
                into[1] += series[1]
            else:
                for labels, value in series:
                    into[tuple(labels)] = into.get(tuple(labels), 0.0) + value
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(merged, constant_labels))
    return generate_latest(registry)


class _Page(Collector):
    def __init__(self, merged: dict[str, list[Any]], constant: dict[str, str]) -> None:
        self._merged, self._constant = merged, constant

    def collect(self) -> Iterable[Metric]:
        names, fixed = list(self._constant), list(self._constant.values())
        for name, (kind, help, shape, series) in self._merged.items():
            if kind == "histogram":
                counts, running = [], 0
                for bound, count in zip([*map(_bound, shape), "+Inf"], series[0], strict=True):
                    running += count
                    counts.append((bound, running))
                histogram = HistogramMetricFamily(name, help, labels=names)
                histogram.add_metric(fixed, buckets=counts, sum_value=series[1])
                yield histogram
            else:
                family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                metric = family(name, help, labels=[*names, *shape])
                for labels, value in series.items():
                    metric.add_metric([*fixed, *labels], value)
                yield metric


def _bound(value: float) -> str:
    return str(float(value))
