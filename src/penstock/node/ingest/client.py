"""The producer's side of ingest: used like the writer of a log, while the node is the one that writes."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock import errors
from penstock.batch import Batch
from penstock.disk import ClosingHandle
from penstock.errors import ClosedError, NotConnected, OptionsError, PenstockError, RetryError, Timeout
from penstock.log.columns import whole_numbers
from penstock.net.hosts import check_address
from penstock.net.unixpath import short_path
from penstock.node.ingest import wire
from penstock.node.ingest.server import socket_path
from penstock.node.ingest.wire import FrameCutter, Hello, IngestBatch, IngestRefusal, Welcome

__all__ = ["IngestWriter"]

WINDOW_BYTES: Final = 8 << 20
"""What may be under way before ``send`` waits for acknowledgements."""
BATCH_RECORDS: Final = 65_536
READ_BYTES: Final = 1 << 18
FIRST_PAUSE_SECONDS: Final = 0.05
LAST_PAUSE_SECONDS: Final = 0.5
CLOSED: Final = "is closed"


class _Sent(msgspec.Struct):
    first: int
    count: int
    data: bytes


class IngestWriter(ClosingHandle):
    """Appends to a channel of a node, from any process on its machine; safe to use from several threads.

    ``append`` returns when the log has the record, and when it survives a power cut where the channel says
    ``sync = "always"``.  While the node is away it waits, up to ``timeout``, and hands over again what was not
    acknowledged; the node knows what it has, so nothing is lost or doubled by that.  After a Timeout or NotConnected
    what was handed over is still held here: ``flush`` goes on with it.

    ``writer`` is a name under which the node counts; a process that comes back under its name can ask
    ``last_sequence``, how many of its records the log has.  Unless given it is random.  ``content`` is ``raw`` or
    ``envelope/1`` where it matters: a new channel is made so, and another one is refused.

    >>> IngestWriter("nowhere", "readings", timeout=0).append(b"21.5")
    Traceback (most recent call last):
    penstock.errors.NotConnected: nowhere/ingest.sock: no node answers (No such file or directory)
    """

    def __init__(
        self,
        node: str | os.PathLike[str],
        channel: str,
        *,
        writer: str = "",
        content: str = "",
        timeout: float = 60.0,
    ) -> None:
        super().__init__()
        self.channel, self.timeout, self._content = channel, timeout, content
        self.writer = writer or secrets.token_hex(8)
        self._instance = secrets.token_hex(8)
        self._place = _place(os.fspath(node))
        self._socket: socket.socket | None = None
        self._cutter = FrameCutter("")
        self._unacked: deque[_Sent] = deque()
        self._unacked_bytes = 0
        self._sequence: int | None = None
        self._positions: list[NDArray[np.int64]] | None = None
        self._synced = 0
        self._sync_number = 0
        self._durable = -1
        self._limit = wire.MAX_BATCH_BYTES
        self._mutex = threading.RLock()
        self._closed = ""
        self.has_times = True

    # --- Writing

    @property
    def largest_message(self) -> int:
        """The largest record that is handed over; the log behind the node may take less."""
        return wire.MAX_RECORD_BYTES

    def append(self, payload: Any, *, kind: int = 0, timestamp_ns: int | None = None) -> int:
        """Append one record and return its position; -1 when the node had it already, from before it was restarted."""
        positions = self.append_many([payload], kind=kind, timestamp_ns=timestamp_ns)
        return int(positions[0])

    def append_many(self, payloads: Any, *, kind: Any = 0, timestamp_ns: Any = None) -> NDArray[np.int64]:
        """Append a list of bytes or a Batch, and return the positions when the log has all of them."""
        with self._mutex:
            self.flush()
            self._positions = []
            try:
                self.send(payloads, kind=kind, timestamp_ns=timestamp_ns)
                self.flush()
                return np.concatenate([np.empty(0, np.int64), *self._positions])
            finally:
                self._positions = None

    def send(self, payloads: Any, *, kind: Any = 0, timestamp_ns: Any = None) -> None:
        """Hand records over and do not wait for the log; ``flush`` does.  It waits while too much is under way."""
        with self._mutex:
            self._check()
            records = (
                payloads.to_payloads() if isinstance(payloads, Batch) else [bytes(memoryview(one)) for one in payloads]
            )
            longest = max(map(len, records), default=0)
            if longest > wire.MAX_RECORD_BYTES:
                raise OptionsError(
                    f"{self.channel}: a record of {longest} bytes; at most {wire.MAX_RECORD_BYTES} are taken"
                )
            times = _column("timestamp_ns", timestamp_ns, len(records), None)
            kinds = _column("kind", kind, len(records), 0)
            deadline = time.monotonic() + self.timeout
            if self._socket is None:
                self._connect(deadline)
            for begin, end in _pieces(records, self._limit):
                assert self._sequence is not None
                batch = IngestBatch(
                    self._sequence + 1, records[begin:end],
                    None if times is None else times[begin:end], None if kinds is None else kinds[begin:end],
                )  # fmt: skip
                sent = _Sent(batch.first, end - begin, wire.encode_batch(batch))
                self._sequence = batch.last
                self._unacked.append(sent)
                self._unacked_bytes += len(sent.data)
                self._transmit(sent.data, deadline)
                while self._unacked_bytes > WINDOW_BYTES:
                    self._receive(deadline)

    def flush(self) -> None:
        """Return when the log has everything that was handed over."""
        with self._mutex:
            self._check()
            deadline = time.monotonic() + self.timeout
            while self._unacked:
                self._receive(deadline)

    def sync(self) -> int:
        """Return when everything appended so far survives a power cut, with that position."""
        with self._mutex:
            self.flush()
            deadline = time.monotonic() + self.timeout
            if self._socket is None:
                self._connect(deadline)
            self._sync_number += 1
            self._transmit(self._sync_frame(), deadline)
            while self._synced < self._sync_number:
                self._receive(deadline)
            return self._durable

    @property
    def last_sequence(self) -> int:
        """How many records of this writer the log has; asks the node when nothing was sent yet."""
        with self._mutex:
            self._check()
            if self._sequence is None:
                self._connect(time.monotonic() + self.timeout)
            assert self._sequence is not None
            return self._unacked[0].first - 1 if self._unacked else self._sequence

    def close(self) -> None:
        """Wait for what is under way and let go of the connection."""
        with self._mutex:
            if self._closed:
                return
            try:
                self.flush()
            finally:
                self._closed = CLOSED
                self._hang_up()

    def forked(self) -> None:
        """Close in the child of a fork: the connection, and the numbers of the records, stay the parent's."""
        self._mutex = threading.RLock()
        self._closed = "was opened before a fork: open another one in the child"
        self._hang_up()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is not None:
            self._closed = self._closed or CLOSED
            self._hang_up()
        else:
            self.close()

    # --- The connection

    def _transmit(self, data: bytes, deadline: float) -> None:
        """Send bytes; a connection that breaks is made again, and with it goes everything unacknowledged."""
        if self._socket is None:
            self._connect(deadline)
            return
        try:
            self._send_all(self._socket, data, deadline)
        except RetryError:
            raise
        except OSError:
            self._connect(deadline)

    def _send_all(self, door: socket.socket, data: bytes, deadline: float) -> None:
        """Send all, taking what comes meanwhile, so that two full buffers never wait for each other.

        Who cannot send all of it hangs up: what is sent next would be taken for the rest.
        """
        view = memoryview(data)
        try:
            while view:
                door.settimeout(min(1.0, _left(deadline, self.channel)))
                try:
                    view = view[door.send(view[:READ_BYTES]) :]
                except TimeoutError:
                    self._take_pending(door)
        except BaseException:
            self._hang_up()
            raise

    def _receive(self, deadline: float) -> None:
        """Take one read of the socket."""
        if self._socket is None:
            self._connect(deadline)
            return
        self._socket.settimeout(_left(deadline, self.channel))
        try:
            data = self._socket.recv(READ_BYTES)
        except TimeoutError:
            raise Timeout(f"{self.channel}: no acknowledgement within {self.timeout:g} s") from None
        except OSError:
            data = b""
        if not data:
            self._connect(deadline)
            return
        self._take(data, deadline)

    def _take_pending(self, door: socket.socket) -> None:
        door.settimeout(0)
        try:
            data = door.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("closed")
        self._take(data, None)

    def _take(self, data: bytes, deadline: float | None) -> None:
        for kind, body in self._cutter.feed(data):
            if kind == wire.ACK:
                self._acked(wire.decode_ack(self.channel, body))
            elif kind == wire.SYNCED:
                self._synced, self._durable = wire.NUMBER_AT.unpack(body)
            elif kind == wire.REFUSED:
                error = _error(wire.decode_message(self.channel, body, IngestRefusal))
                self._hang_up()
                if not isinstance(error, RetryError):
                    self._give_up()
                    raise error
                if deadline is None:
                    raise ConnectionError(str(error))
                self._connect(deadline, str(error))
                return

    def _acked(self, ack: wire.IngestAck) -> None:
        while self._unacked and self._unacked[0].first + self._unacked[0].count - 1 <= ack.last:
            sent = self._unacked.popleft()
            self._unacked_bytes -= len(sent.data)
            if self._positions is not None:
                known = ack.positions if len(ack.positions) == sent.count else np.full(sent.count, -1, np.int64)
                self._positions.append(known)

    def _connect(self, deadline: float, reason: str = "") -> None:
        """Connect, and hand over again what the log does not have; with growing pauses until the deadline."""
        self._hang_up()
        pause = FIRST_PAUSE_SECONDS if reason else 0.0
        told = bool(reason)  # by the node itself
        while True:
            if pause:
                if time.monotonic() + pause > deadline:
                    raise NotConnected(
                        f"{self._name()}: {'the node takes nothing' if told else 'no node answers'} ({reason})"
                    )
                time.sleep(pause * (0.5 + secrets.randbelow(1000) / 1000))
            try:
                self._greet(deadline)
                return
            except (OSError, RetryError) as exc:
                self._hang_up()
                reason = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
                told = isinstance(exc, RetryError)
            except BaseException:  # an interrupt: nothing goes over what is half greeted
                self._hang_up()
                raise
            pause = min(max(2 * pause, FIRST_PAUSE_SECONDS), LAST_PAUSE_SECONDS)

    def _greet(self, deadline: float) -> None:
        door = _dial(self._place, max(0.1, min(10.0, deadline - time.monotonic())))
        self._socket, self._cutter = door, FrameCutter(self.channel)
        hello = Hello(self.writer, self._instance, self.channel, content=self._content)
        door.sendall(wire.frame(wire.HELLO, msgspec.msgpack.encode(hello)))
        welcome = self._welcome(door)
        self._limit, self.has_times = welcome.max_batch_bytes, welcome.has_times
        if self._sequence is None:
            self._sequence = welcome.last
        self._acked(wire.IngestAck(welcome.last, np.empty(0, np.int64)))
        for sent in list(self._unacked):
            self._send_all(door, sent.data, deadline)
        if self._synced < self._sync_number:
            self._send_all(door, self._sync_frame(), deadline)

    def _welcome(self, door: socket.socket) -> Welcome:
        while True:
            data = door.recv(READ_BYTES)
            if not data:
                raise ConnectionError("the node hung up")
            for kind, body in self._cutter.feed(data):
                if kind == wire.REFUSED:
                    error = _error(wire.decode_message(self.channel, body, IngestRefusal))
                    if not isinstance(error, RetryError):
                        self._hang_up()
                        self._give_up()
                    raise error
                if kind == wire.WELCOME:
                    welcome: Welcome = wire.decode_message(self.channel, body, Welcome)
                    return welcome

    def _sync_frame(self) -> bytes:
        return wire.frame(wire.SYNC, wire.NUMBER.pack(self._sync_number))

    def _give_up(self) -> None:
        """Forget what is under way: the node will never take it, and the error says so."""
        self._unacked.clear()
        self._unacked_bytes, self._sequence = 0, None
        self._synced = self._sync_number

    def _hang_up(self) -> None:
        door, self._socket = self._socket, None
        if door is not None:
            door.close()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.channel}: the ingest writer {self._closed}")

    def _name(self) -> str:
        return self._place if isinstance(self._place, str) else f"{self._place[0]}:{self._place[1]}"


def _place(node: str) -> str | tuple[str, int]:
    """Return where a node takes records: of a data directory, a socket or HOST:PORT."""
    host, colon, port = node.rpartition(":")
    if colon and re.fullmatch("[0-9]{1,18}", port) and not os.path.exists(node):
        place = host.strip("[]") or "127.0.0.1", int(port)
        check_address(*place)
        return place
    return node if node.endswith(".sock") else socket_path(node)


def _dial(place: str | tuple[str, int], seconds: float) -> socket.socket:
    if isinstance(place, tuple):
        door = socket.create_connection(place, seconds)
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return door
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.settimeout(seconds)
        with short_path(place) as path:
            door.connect(path)
    except BaseException:
        door.close()
        raise
    return door


def _left(deadline: float, channel: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise Timeout(f"{channel}: the node did not answer in time")
    return left


def _error(refused: IngestRefusal) -> PenstockError:
    """Return the error that the node named; whatever is not ours becomes a RetryError."""
    kind = getattr(errors, refused.error, None)
    if kind in (errors.OptionsError, errors.NotFoundError):
        return OptionsError(refused.message)
    if kind is errors.ProtocolError:
        return errors.ProtocolError("the node", "a frame", refused.message)
    if kind in (errors.LockedError, errors.ReadOnlyError, errors.UnsupportedError):
        found: PenstockError = kind(refused.message)
        return found
    return RetryError(refused.message)


def _column(name: str, value: Any, count: int, default: Any) -> NDArray[np.int64] | None:
    if value is default or (isinstance(value, int) and value == default):
        return None
    numbers = whole_numbers(name, value)
    for most in (int(numbers.max()), int(numbers.min())) if numbers.size else ():
        if not -(1 << 63) <= most < 1 << 63:
            raise OptionsError(f"{name}={most}: more than 63 bits")
    column = np.asarray(numbers, np.int64)
    if column.ndim and len(column) != count:
        raise OptionsError(f"{len(column)} values for {count} records")
    return np.broadcast_to(column, (count,))


def _pieces(records: list[bytes], limit: int) -> list[tuple[int, int]]:
    """Return where to cut records so that no batch is larger than it should be.

    >>> _pieces([b"12", b"34", b"5"], 4)
    [(0, 2), (2, 3)]
    """
    pieces, begin, size = [], 0, 0
    for at, record in enumerate(records):
        if at > begin and (size + len(record) > limit or at - begin >= BATCH_RECORDS):
            pieces.append((begin, at))
            begin, size = at, 0
        size += len(record)
    if records:
        pieces.append((begin, len(records)))
    return pieces
