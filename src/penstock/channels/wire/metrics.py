"""The metrics endpoint of a channel server: everything it counts, as ``penstock_channels_…``, in OpenMetrics text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from penstock.metrics import REGISTRY, Sample
from penstock.net import Connection, Endpoint, Listeners, listen

__all__ = ["render", "serve_metrics"]

PARTS: Final = ("channel", "channels_", "store_", "message_log_", "fifo_", "c2s_", "m2s_", "s2m_")
PREFIX: Final = "penstock_channels_"


def render(samples: Iterable[Sample]) -> str:
    """Return the samples that belong to channels in the text form.

    >>> from penstock.metrics import Registry
    >>> registry = Registry(); registry.counter("c2s_messages_received", "messages from clients").add(3)
    >>> print(render(registry.samples()))
    # HELP penstock_channels_c2s_messages_received messages from clients
    # TYPE penstock_channels_c2s_messages_received counter
    penstock_channels_c2s_messages_received_total 3
    # EOF
    <BLANKLINE>
    """
    lines: list[str] = []
    last = ""
    for sample in samples:
        if not sample.name.startswith(PARTS):
            continue
        name = PREFIX + sample.name.removeprefix("channels_")
        if sample.name != last:
            lines += [f"# HELP {name} {sample.help}", f"# TYPE {name} {sample.kind}"]
            last = sample.name
        pairs = [f'{label}="{value}"' for label, value in sample.labels.items()]
        labels = "{" + ",".join(pairs) + "}" if pairs else ""
        if sample.kind == "histogram":
            for bound, count in sample.buckets:
                inside = ",".join([*pairs, f'le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"'])
                lines.append(f"{name}_bucket{{{inside}}} {count}")
            lines += [f"{name}_count{labels} {sample.count}", f"{name}_sum{labels} {sample.value:.15g}"]
        else:
            ending = "_total" if sample.kind == "counter" else ""
            lines.append(f"{name}{ending}{labels} {sample.value:.15g}")
    return "\n".join([*lines, "# EOF", ""])


class _Scrape:
    """Answers one request, whatever it asks, and closes: as the original does."""

    def opened(self, connection: Connection) -> None:
        self._connection = connection
        connection.set_deadline(5.0, absolute=True)

    def received(self, _: bytes) -> None:
        body = render(REGISTRY.samples(untouched=True)).encode()
        head = (
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._connection.write(head.encode() + body)
        self._connection.close("answered")

    def congested(self) -> None:
        pass

    def writable(self) -> None:
        pass

    def expired(self) -> None:
        self._connection.abort("nothing was asked")

    def closed(self, reason: str) -> None:
        pass


async def serve_metrics(address: str) -> Listeners:
    """Listen for scrapes at ``host:port``.

    >>> import asyncio
    >>> async def demo():
    ...     listeners = await serve_metrics("127.0.0.1:0")
    ...     reader, writer = await asyncio.open_connection(*listeners.addresses["metrics"].split(":"))
    ...     writer.write(b"GET /metrics HTTP/1.0" + bytes([13, 10, 13, 10])); line = await reader.readline()
    ...     await reader.read(); writer.close(); await writer.wait_closed(); await listeners.close()
    ...     return line.strip()
    >>> asyncio.run(demo())
    b'HTTP/1.1 200 OK'
    """
    host, _, port = address.rpartition(":")
    return await listen([Endpoint(name="metrics", host=host.strip("[]") or "127.0.0.1", port=int(port))], _Scrape)
