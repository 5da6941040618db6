"""A message with a traceparent gets a span where a tap writes it, and a collector hears of it."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.log import open_log
from penstock.log.envelope import decode_envelope
from penstock.mqtt import Client
from penstock.mqtt.packets import Properties
from penstock.node.config import load_config
from penstock.node.node import Node

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an OTLP exporter sends."""

    bodies: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.bodies = []
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_traced_message_has_a_span_at_its_tap_and_a_header_in_its_log(tmp_path: Path, collector: str) -> None:
    config = load_config(None, {
        "data": str(tmp_path / "d"), "mqtt.port": 0, "channels.enabled": False, "http.enabled": False,
        "mqtt.taps": [{"name": "plant", "filter": "plant/#", "path": str(tmp_path / "plant")}],
        "telemetry.enabled": True, "telemetry.endpoint": collector,
    })  # fmt: skip

    async def run() -> None:
        node = Node(config)
        await node.start()
        assert node.failures == {}
        try:
            async with Client(f"mqtt://{node.addresses['mqtt']}") as client:
                for trace in (f"00-{TRACE}-{PARENT}-01", "nonsense", ""):
                    user = (("traceparent", trace),) if trace else ()
                    await client.publish("plant/7", b"21.5", qos=1, properties=Properties(user=user))
        finally:
            await node.stop()

    asyncio.run(run())
    with open_log(str(tmp_path / "plant")) as log:
        envelopes = [decode_envelope(payload) for payload in log.read(log.first_position).to_payloads()]
    assert len(envelopes) == 3
    assert dict(envelopes[0].headers)["user.traceparent"] == f"00-{TRACE}-{PARENT}-01".encode()
    spans = [
        span
        for body in Collector.bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    (span,) = spans
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.name) == (TRACE, PARENT, "tap:plant")
    assert {item.key: item.value.string_value for item in span.attributes}["messaging.destination.name"] == "plant/7"
    assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
