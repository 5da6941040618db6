"""The registry as Prometheus reads it: ``penstock_`` names, ``_total`` for what only grows."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import TYPE_CHECKING, Any

from penstock.metrics import REGISTRY, Registry, Sample

if TYPE_CHECKING:
    from prometheus_client.registry import Collector
else:
    try:
        from prometheus_client.registry import Collector
    except ModuleNotFoundError:  # the extra ``serve`` brings it; who has none serves no metrics
        Collector = object

__all__ = ["exposition", "CONTENT_TYPE"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Registry(Collector):
    """Our registry behind the face of prometheus-client."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Any]:
        """Yield a family for each metric."""
        from prometheus_client import core

        families: dict[str, Any] = {}
        for sample in self._registry.samples():
            family = families.get(sample.name)
            if family is None:
                kinds = {
                    "counter": core.CounterMetricFamily,
                    "gauge": core.GaugeMetricFamily,
                    "histogram": core.HistogramMetricFamily,
                }
                name = sample.name if sample.name.startswith("penstock_") else f"penstock_{sample.name}"
                family = families[sample.name] = kinds[sample.kind](name, sample.help, labels=sorted(sample.labels))
            _add(family, sample)
        info = core.GaugeMetricFamily("penstock_build_info", "which release this is", labels=["version"])
        info.add_metric([metadata.version("penstock")], 1)
        return [*families.values(), info]


def _add(family: Any, sample: Sample) -> None:
    labels = [sample.labels[name] for name in sorted(sample.labels)]
    if sample.kind == "histogram":
        buckets = [(f"{bound:g}", count) for bound, count in sample.buckets]
        if not buckets or buckets[-1][0] != "inf":
            buckets.append(("+Inf", sample.count))
        family.add_metric(
            labels, [("+Inf" if bound == "inf" else bound, count) for bound, count in buckets], sample.value
        )
    else:
        family.add_metric(labels, sample.value)


def exposition(registry: Registry = REGISTRY) -> bytes:
    """Return all metrics in the text format.

    >>> registry = Registry()
    >>> registry.counter("sends", "messages sent").add(3)
    >>> b"penstock_sends_total 3.0" in exposition(registry)
    True
    """
    from prometheus_client import CollectorRegistry, generate_latest

    collected = CollectorRegistry(auto_describe=False)
    collected.register(_Registry(registry))
    text: bytes = generate_latest(collected)
    return text
