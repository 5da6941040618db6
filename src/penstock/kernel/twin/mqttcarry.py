"""The same as ``penstock.kernel.mqttcarry``, in plain Python."""

from __future__ import annotations

import struct
from typing import Any

__all__ = ["carry"]

HEAD = struct.Struct("<BBHQII")


def carry(runs: list[Any], headers: list[bytes], times: list[int], id_head: bytes, offsets: Any, lengths: Any) -> bytes:
    """Return the messages of runs as envelopes one after another, and fill in where each is."""
    if not len(runs) == len(headers) == len(times):
        raise ValueError(f"{len(runs)} runs with {len(headers)} headers and {len(times)} times")
    records = []
    for run, heads, when in zip(runs, headers, times, strict=True):
        for index, payload in enumerate(run.payloads()):
            own = heads + id_head + (run.first_id + index).to_bytes(2, "big") if run.qos == 2 else heads
            records.append(HEAD.pack(1, 0, 0, when, len(run.topic), len(own)) + run.topic + own + payload)
    if len(offsets) != len(records) or len(lengths) != len(records):
        raise ValueError(f"{len(offsets)} spans for {len(records)} messages")
    at = 0
    for row, record in enumerate(records):
        offsets[row], lengths[row] = at, len(record)
        at += len(record)
    return b"".join(records)
