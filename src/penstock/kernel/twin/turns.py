"""The same as ``penstock.kernel.turns``, in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

__all__ = ["Turns", "Wire"]

JOINED: Final = 64 << 10
SHORT: Final = 8 << 10


class Turns:
    """The write at the end of a turn of a loop, for all its connections."""

    __slots__ = ("_call_soon", "_waiting", "gathers", "read_at", "time")

    def __init__(self, loop: Any) -> None:
        self.time: Callable[[], float] = loop.time
        self._call_soon = loop.call_soon
        self._waiting: list[Any] = []
        self.read_at = 0.0
        self.gathers = True

    def flush_later(self, connection: Any) -> None:
        """Flush a connection when this turn of the loop has run; called once a turn by each that wrote."""
        if self.gathers and not self._waiting:
            self._call_soon(self._flush)
        self._waiting.append(connection)

    def read_ended(self) -> None:
        """Write at once what the first read of a millisecond caused."""
        self.gathers = True
        if self._waiting:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            connection.flush()


class Wire:
    """The part of a connection that bytes pass."""

    __slots__ = (
        "_closing", "_filters", "_high_water", "_last_read", "_lost", "_out", "_pending", "_queued", "_receive",
        "_slow", "_transport", "_turns",
    )  # fmt: skip

    def __init__(self, turns: Turns, high_water: int) -> None:
        self._turns, self._high_water = turns, high_water
        self._transport: Any = None
        self._receive: Any = None
        self._filters: tuple[Any, ...] = ()
        self._out: list[bytes | memoryview] = []
        self._pending = 0
        self._queued = self._closing = self._lost = self._slow = False
        self._last_read = 0.0

    def write(self, data: bytes | memoryview) -> None:
        """Send ``data`` at the end of this turn of the loop; it must not change afterwards."""
        self.write_many((data,))

    def write_many(self, chunks: Sequence[bytes | memoryview]) -> None:
        """Send chunks one after the other; one write with everything else of this turn."""
        if self._closing:
            return
        self._out += chunks
        self._pending += sum(map(len, chunks))
        if not self._queued:
            self._queued = True
            self._turns.flush_later(self)
        elif self._pending > self._high_water:
            self.flush()

    def flush(self) -> None:
        """Hand what was written to the loop."""
        self._queued = False
        out, pending = self._out, self._pending
        if not out or self._lost:
            return
        self._out, self._pending = [], 0
        if self._filters:
            self._send_filtered(out)
        elif len(out) == 1:
            self._transport.write(out[0])
        elif pending <= JOINED or pending < SHORT * len(out):
            self._transport.write(b"".join(out))
        else:
            self._transport.writelines(out)
        if self._slow:
            self._check_bound()

    def data_received(self, data: bytes) -> None:
        """Take what one read brought."""
        turns = self._turns
        self._last_read = now = turns.time()
        if now != turns.read_at:
            turns.read_at, turns.gathers = now, False
        self._queued = True
        try:
            self._receive(data)
            if self._out:
                self.flush()
            else:
                self._queued = False
        except Exception as exc:  # noqa: BLE001
            self._failed(exc)
        if not turns.gathers:
            turns.read_ended()

    def _send_filtered(self, out: list[bytes | memoryview]) -> None:
        raise NotImplementedError

    def _check_bound(self) -> None:
        raise NotImplementedError

    def _failed(self, exc: Exception) -> None:
        raise NotImplementedError
