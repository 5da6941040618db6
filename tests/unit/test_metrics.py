"""Promise: metrics count from any thread, and one name is one metric."""

from __future__ import annotations

import threading

import pytest

from penstock.errors import OptionsError
from penstock.metrics import REGISTRY, Registry, Sample


def test_a_name_is_one_metric() -> None:
    registry = Registry()
    first = registry.counter("sends", "messages sent", ("to",))
    assert registry.counter("sends", "messages sent", ("to",)) is first
    with pytest.raises(OptionsError, match="metric sends exists as counter"):
        registry.gauge("sends", "messages sent", ("to",))
    with pytest.raises(OptionsError, match="exists as counter with labels"):
        registry.counter("sends", "messages sent")
    assert isinstance(REGISTRY, Registry)


def test_labels_are_checked_and_kept_apart() -> None:
    metric = Registry().counter("sends", "messages sent", ("to",))
    metric.add(to="a")
    metric.add(2, to="b")
    assert (metric.value(to="a"), metric.value(to="b"), metric.value(to="c")) == (1, 2, 0)
    for labels in ({}, {"form": "a"}, {"to": "a", "more": "b"}):
        with pytest.raises(OptionsError, match="metric sends has"):
            metric.add(**labels)  # type: ignore[arg-type]
    assert [sample.labels for sample in metric.samples()] == [{"to": "a"}, {"to": "b"}]


def test_a_gauge_goes_up_and_down() -> None:
    gauge = Registry().gauge("lag", "records behind")
    gauge.set(5)
    gauge.add(-2)
    assert gauge.value() == 3


def test_a_histogram_counts_up_to_each_bound() -> None:
    registry = Registry()
    histogram = registry.histogram("seconds", "how long", bounds=(1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert list(registry.samples()) == [
        Sample("seconds", "histogram", "how long", {}, 12.0, 4, ((1.0, 2), (2.0, 3), (float("inf"), 4)))
    ]


def test_samples_come_by_name() -> None:
    registry = Registry()
    for name in ("b", "a"):
        registry.counter(name, name).add()
    assert [sample.name for sample in registry.samples()] == ["a", "b"]


def test_threads_lose_no_count() -> None:
    metric = Registry().counter("n", "n")
    threads = [threading.Thread(target=lambda: [metric.add() for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metric.value() == 8000
