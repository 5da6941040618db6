"""The same as ``penstock.kernel.mqttcarry``, in plain Python."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

__all__ = ["Carrier", "carry"]

HEAD = struct.Struct("<BBHQII")


def carry(runs: list[Any], headers: list[bytes], times: list[int], id_head: bytes, offsets: Any, lengths: Any) -> bytes:
    """Return the messages of runs as envelopes one after another, and fill in where each is."""
    _check_alike(runs, headers, times)
    records = list(_records(runs, headers, times, id_head))
    if len(offsets) != len(records) or len(lengths) != len(records):
        raise ValueError(f"{len(offsets)} spans for {len(records)} messages")
    at = 0
    for row, record in enumerate(records):
        offsets[row], lengths[row] = at, len(record)
        at += len(record)
    return b"".join(records)


class Carrier:
    """Runs on their way into an xchannel; only the compiled kernel writes one, so this has its Appender too."""

    def __init__(self, runs: list[Any], headers: list[bytes], times: list[int], id_head: bytes) -> None:
        _check_alike(runs, headers, times)
        self.last = -1
        self._records = _records(runs, headers, times, id_head)
        self._next = next(self._records, None)

    def fill(self, log: Any) -> int:
        """Publish messages while there is room; return the size of the record that found none, -1 behind the last."""
        while self._next is not None:
            if not log.fits(len(self._next)):
                return len(self._next)
            self.last = log.append(self._next)
            self._next = next(self._records, None)
        return -1


def _check_alike(runs: list[Any], headers: list[bytes], times: list[int]) -> None:
    if not len(runs) == len(headers) == len(times):
        raise ValueError(f"{len(runs)} runs with {len(headers)} headers and {len(times)} times")


def _records(runs: list[Any], headers: list[bytes], times: list[int], id_head: bytes) -> Iterator[bytes]:
    for run, heads, when in zip(runs, headers, times, strict=True):
        for index, payload in enumerate(run.payloads()):
            own = heads + id_head + (run.first_id + index).to_bytes(2, "big") if run.qos == 2 else heads
            yield HEAD.pack(1, 0, 0, when, len(run.topic), len(own)) + run.topic + own + payload
