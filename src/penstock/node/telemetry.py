"""Traces: a message that carries a ``traceparent`` gets a span where a tap writes it, sent to a collector.

MQTT 5 has user properties for it; a tap keeps them as headers of the record (``user.traceparent``), so whoever reads
the log goes on with the same trace, Spark as a column (penstock.spark.decode.with_trace).  The extra ``otel`` brings
the SDK; where to send, and what to sample, is said by its own variables (``OTEL_EXPORTER_OTLP_ENDPOINT``, …).
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import OptionsError
from penstock.mqtt.carried import headers_for, open_headers

if TYPE_CHECKING:
    from penstock.kernel.mqtt import Run

__all__ = ["Telemetry"]

TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
FIELDS: Final = ("traceparent", "tracestate")


class Telemetry:
    """Makes spans and sends them; ``endpoint`` is that of a collector, or what the environment says.

    >>> Telemetry.parent_of([("traceparent", "nonsense")])
    {}
    """

    def __init__(self, endpoint: str = "") -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise OptionsError("telemetry: needs the extra otel: pip install 'penstock[otel]'") from None
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces") if endpoint else OTLPSpanExporter()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "penstock"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("penstock")
        self._context, self._kind = TraceContextTextMapPropagator(), SpanKind.CONSUMER

    @staticmethod
    def parent_of(properties: Any) -> dict[str, str]:
        """Return the trace that user properties name, if they name one that is well formed."""
        found = {name.lower(): value for name, value in properties if name.lower() in FIELDS}
        return found if TRACEPARENT.fullmatch(found.get("traceparent", "")) else {}

    def tapped(self, tap: str, path: str, run: Run, when_ns: int) -> None:
        """Note that a tap has written messages that came at ``when_ns``."""
        with contextlib.suppress(ValueError):  # properties that say something else
            parent = self.parent_of(open_headers(headers_for(0, False, "", run.forward)).properties.user)
            if parent:
                attributes = {
                    "messaging.system": "mqtt",
                    "messaging.operation.type": "process",
                    "messaging.destination.name": run.topic.decode(errors="replace"),
                    "messaging.batch.message_count": run.count,
                    "penstock.log": path,
                }
                context = self._context.extract(parent)
                self._tracer.start_span(tap, context, self._kind, attributes, start_time=when_ns).end()

    def stop(self) -> None:
        """Send what waits to be sent, and end."""
        self._provider.shutdown()
