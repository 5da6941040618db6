"""A registry of counters, gauges and histograms.  No server: an endpoint may export it later.

Metrics are counted where things happen and read as one snapshot.  A metric is created once, at
import of the module that owns it; asking for it again by the same name returns the same one.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from penstock.errors import OptionsError

__all__ = ["Registry", "Metric", "Sample", "REGISTRY"]

MetricKind = Literal["counter", "gauge", "histogram"]

SECONDS_BUCKETS = (1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0, 5.0)


class Sample(msgspec.Struct, frozen=True):
    """One number of one metric, as an exporter sees it.

    ``buckets`` holds (upper bound, count up to it) and is empty unless it is a histogram.

    >>> registry = Registry()
    >>> registry.counter("sends", "messages sent").add(3)
    >>> [(s.name, s.value) for s in registry.samples()]
    [('sends', 3.0)]
    """

    name: str
    kind: MetricKind
    help: str
    labels: Mapping[str, str]
    value: float
    count: int = 0
    buckets: tuple[tuple[float, int], ...] = ()


class Metric:
    """One named metric with its labels; every method may be called from any thread.

    >>> saves = Registry().counter("store_saves", "metadata saves", labels=("result",))
    >>> saves.add(result="ok"); saves.add(result="ok")
    >>> saves.value(result="ok")
    2.0
    """

    def __init__(
        self, name: str, kind: MetricKind, help: str, labels: tuple[str, ...], bounds: tuple[float, ...]
    ) -> None:
        self.name, self.kind, self.help, self.labels, self.bounds = name, kind, help, labels, bounds
        self._values: dict[tuple[str, ...], float] = {}
        self._buckets: dict[tuple[str, ...], list[int]] = {}
        self._lock = threading.Lock()

    def add(self, amount: float = 1, **labels: str) -> None:
        """Raise a counter or a gauge by ``amount``."""
        key = self._key(labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount

    def set(self, value: float, **labels: str) -> None:
        """Put a gauge to ``value``."""
        key = self._key(labels)
        with self._lock:
            self._values[key] = float(value)

    def replace(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Put a gauge to these values by their labels, and forget all others.

        >>> waiting = Registry().gauge("waiting", "messages that wait", labels=("client",))
        >>> waiting.set(3, client="a"); waiting.replace({("b",): 4})
        >>> [(sample.labels["client"], sample.value) for sample in waiting.samples()]
        [('b', 4.0)]
        """
        with self._lock:
            self._values = {key: float(value) for key, value in values.items()}

    def observe(self, value: float, times: int = 1, /, **labels: str) -> None:
        """Count one observation in a histogram, or as many equal ones as ``times`` says."""
        key = self._key(labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + value * times
            counts = self._buckets.setdefault(key, [0] * (len(self.bounds) + 1))
            counts[bisect.bisect_left(self.bounds, value)] += times

    def value(self, **labels: str) -> float:
        """Return the current value; for a histogram the sum of what was observed."""
        with self._lock:
            return self._values.get(self._key(labels), 0.0)

    def samples(self, *, untouched: bool = False) -> list[Sample]:
        """Return one sample for each set of labels seen so far.

        With ``untouched`` a metric without labels has one from the start, which is zero.
        """
        with self._lock:
            values = dict(self._values)
            buckets = {key: list(counts) for key, counts in self._buckets.items()}
        if untouched and not values and not self.labels:
            values[()] = 0.0
            if self.kind == "histogram":
                buckets[()] = [0] * (len(self.bounds) + 1)
        samples = []
        for key, value in sorted(values.items()):
            running, steps = 0, []
            for bound, count in zip((*self.bounds, float("inf")), buckets.get(key, ()), strict=False):
                running += count
                steps.append((bound, running))
            labels = dict(zip(self.labels, key, strict=True))
            samples.append(Sample(self.name, self.kind, self.help, labels, value, running, tuple(steps)))
        return samples

    def _key(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        if len(labels) != len(self.labels):
            raise OptionsError(f"metric {self.name} has labels {self.labels}, not {tuple(labels)}")
        try:
            return tuple(labels[name] for name in self.labels)
        except KeyError as exc:
            raise OptionsError(f"metric {self.name} has no label {exc}") from None


class Registry:
    """All metrics of a process, by name.

    >>> registry = Registry()
    >>> registry.gauge("lag", "records behind").set(5)
    >>> registry.gauge("lag", "records behind").value()
    5.0
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._lock = threading.Lock()

    def counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Metric:
        """Return the counter of that name, made on first use."""
        return self._get(name, "counter", help, labels, ())

    def gauge(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Metric:
        """Return the gauge of that name, made on first use."""
        return self._get(name, "gauge", help, labels, ())

    def histogram(
        self,
        name: str,
        help: str,
        labels: tuple[str, ...] = (),
        bounds: tuple[float, ...] = SECONDS_BUCKETS,
    ) -> Metric:
        """Return the histogram of that name, made on first use."""
        return self._get(name, "histogram", help, labels, bounds)

    def samples(self, *, untouched: bool = False) -> Iterator[Sample]:
        """Yield every sample of every metric, by name; see ``Metric.samples``."""
        with self._lock:
            metrics = sorted(self._metrics.values(), key=lambda metric: metric.name)
        for metric in metrics:
            yield from metric.samples(untouched=untouched)

    def _get(
        self, name: str, kind: MetricKind, help: str, labels: tuple[str, ...], bounds: tuple[float, ...]
    ) -> Metric:
        with self._lock:
            metric = self._metrics.get(name)
            if metric is None:
                metric = self._metrics[name] = Metric(name, kind, help, labels, bounds)
        if (metric.kind, metric.labels) != (kind, labels):
            raise OptionsError(f"metric {name} exists as {metric.kind} with labels {metric.labels}")
        return metric


REGISTRY = Registry()
"""The registry of this process: what a metrics endpoint exports."""
