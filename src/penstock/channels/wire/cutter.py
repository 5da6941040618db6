"""Cuts what a socket brings into messages: one read is one batch, and plain broadcasts in it come out as runs.

A read may end anywhere.  What breaks the protocol comes out as a Fault, last: what came before it is still good.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import msgspec

from penstock import kernel
from penstock.channels.wire.frames import BadLine, Frame, decode_line

__all__ = ["Cutter", "BroadcastRun", "MessageRun", "AckRun", "Fault", "Item", "cut_server_run", "cut_client_run"]


class BroadcastRun(msgspec.Struct, frozen=True):
    """BROADCASTs on one channel with one QoS, in a row."""

    channel: str
    qos: int
    ids: bytes
    """32 bits each, in the order of this machine."""
    payloads: list[bytes]
    sizes: bytes
    """What limits count for each: its line and its payload; 32 bits each."""

    def __len__(self) -> int:
        return len(self.payloads)

    def id_list(self) -> list[int]:
        """Return the ids as numbers."""
        return memoryview(self.ids).cast("I").tolist()

    def size_list(self) -> list[int]:
        """Return the sizes as numbers."""
        return memoryview(self.sizes).cast("I").tolist()

    def first(self, count: int) -> BroadcastRun:
        """Return the run cut short."""
        ids, sizes = self.ids[: 4 * count], self.sizes[: 4 * count]
        return BroadcastRun(self.channel, self.qos, ids, self.payloads[:count], sizes)


class MessageRun(msgspec.Struct, frozen=True):
    """MESSAGEs of one sender on one channel and of one time, numbered in a row."""

    channel: str
    sender: str
    first_seq: int
    timestamp: int
    payloads: list[bytes]


class AckRun(msgspec.Struct, frozen=True):
    """BROADCAST_ACKs in a row."""

    ids: list[int]
    seqs: list[int]


class Fault(msgspec.Struct, frozen=True):
    """The peer broke the protocol: the error it is told before the connection ends."""

    reason: str
    detail: str | None = None
    id: int | None = None


Item = Frame | BroadcastRun | MessageRun | AckRun | Fault
CutRun = Callable[[bytes, int, int, int], tuple[Item, int] | None]

TOO_LONG: Final = Fault("POLICY_VIOLATION", "max message size exceeded")
TOO_LARGE: Final = Fault("POLICY_VIOLATION", "payload too large")
BAD_PAYLOAD: Final = Fault("BAD_REQUEST", "invalid payload format")
_B, _M = b"BM"


def cut_server_run(data: bytes, at: int, max_line: int, max_payload: int) -> tuple[Item, int] | None:
    r"""Cut a run of what clients send many of.

    >>> cut_server_run(b"BROADCAST id=9 channel=!a@localhost length=3\nhi!\n", 0, 100, 100)[0].payloads
    [b'hi!']
    """
    if data[at] != _B:
        return None
    found = kernel.channelwire.cut_broadcasts(data, at, max_line, max_payload)
    if found is None:
        return None
    channel, qos, ids, payloads, sizes, end = found
    return BroadcastRun(channel.decode(), qos, ids, payloads, sizes), end


def cut_client_run(data: bytes, at: int, max_line: int, max_payload: int) -> tuple[Item, int] | None:
    r"""Cut a run of what servers send many of.

    >>> cut_client_run(b"BROADCAST_ACK id=9 seq=4\nBROADCAST_ACK id=10 seq=5\n", 0, 100, 100)[0]
    AckRun(ids=[9, 10], seqs=[4, 5])
    """
    if data[at] == _B:
        acks = kernel.channelwire.cut_acks(data, at, max_line)
        return None if acks is None else (AckRun(acks[0], acks[1]), acks[2])
    if data[at] != _M:
        return None
    found = kernel.channelwire.cut_messages(data, at, max_line, max_payload)
    if found is None:
        return None
    channel, sender, seq, timestamp, payloads, end = found
    return MessageRun(channel.decode(), sender.decode(), seq, timestamp, payloads), end


class Cutter:
    r"""Bytes in, messages out.

    >>> cutter = Cutter(1024, 4096)
    >>> cutter.feed(b"PONG id=5\nPUSH id=6 channel=!q@localhost leng")
    [Frame(name='PONG', fields={'id': 5}, payload=None, size=9)]
    >>> cutter.feed(b"th=3\nab"), cutter.unfinished.name
    ([], 'PUSH')
    >>> cutter.feed(b"c\nNOPE\n")[0].payload, cutter.feed(b"PONG id=7\n")
    (b'abc', [])
    """

    def __init__(self, max_line: int, max_payload: int, cut_run: CutRun = cut_server_run) -> None:
        self.max_line, self.max_payload = max_line, max_payload
        self._cut_run = cut_run
        self._rest: list[bytes] = []
        self._have = 0
        self._frame: Frame | None = None  # its line was read, its payload was not
        self._over = False

    @property
    def unfinished(self) -> Frame | None:
        """The message whose payload is under way, if one is."""
        return self._frame

    def feed(self, data: bytes) -> list[Item]:
        """Return the messages that ``data`` completes; after a Fault nothing more."""
        if self._over:
            return []
        items: list[Item] = []
        at = 0
        if self._rest:
            if self._frame is not None:
                at = self._end_payload(data, items)
                if not at:
                    return items
            else:
                data, self._rest = b"".join([*self._rest, data]), []
        size = len(data)
        while at < size:
            frame = self._frame
            if frame is None:
                run = self._cut_run(data, at, self.max_line, self.max_payload)
                if run is not None:
                    _add(items, run[0])
                    at = run[1]
                    continue
                end = data.find(b"\n", at, min(at + self.max_line, size))
                if end < 0:
                    if size - at >= self.max_line:
                        return self._fault(items, TOO_LONG)
                    break
                try:
                    frame = decode_line(data[at:end])
                except BadLine as exc:
                    return self._fault(items, Fault("BAD_REQUEST", str(exc)))
                frame.size = end - at
                at = end + 1
                if frame.payload_bytes is None:
                    items.append(frame)
                    continue
                if frame.payload_bytes > self.max_payload:
                    return self._fault(items, TOO_LARGE, frame.id)
                self._frame = frame
            length = frame.payload_bytes or 0
            if size - at < length + 1:
                break
            if data[at + length] != 10:
                return self._fault(items, BAD_PAYLOAD, frame.id)
            self._whole(items, frame, data[at : at + length])
            at += length + 1
        if at < size or self._frame is not None:
            self._rest, self._have = [data[at:]], size - at
        return items

    def _end_payload(self, data: bytes, items: list[Item]) -> int:
        """Take what is missing of the payload under way and return where to go on; 0 when nothing is to be cut yet.

        Only the payload is put together: what a read brings behind it is not copied once more.
        """
        frame = self._frame
        assert frame is not None
        last = (frame.payload_bytes or 0) - self._have  # where its LF is
        if len(data) <= last:
            self._rest.append(data)
            self._have += len(data)
            return 0
        if data[last] != 10:
            self._fault(items, BAD_PAYLOAD, frame.id)
            return 0
        payload = b"".join([*self._rest, memoryview(data)[:last]])
        self._rest = []
        self._whole(items, frame, payload)
        return last + 1

    def _whole(self, items: list[Item], frame: Frame, payload: bytes) -> None:
        """Add a message whose payload is there; a BROADCAST that the kernel did not cut is a run of one."""
        self._frame = None
        frame.payload = payload
        frame.size += len(payload)
        _add(items, _run_of(frame) if frame.name == "BROADCAST" else frame)

    def _fault(self, items: list[Item], fault: Fault, id: int | None = None) -> list[Item]:
        self._over, self._rest = True, []
        items.append(fault if id is None else Fault(fault.reason, fault.detail, id))
        return items


def _run_of(frame: Frame) -> BroadcastRun:
    """Return a run of one broadcast."""
    number, size = (int(value).to_bytes(4, sys.byteorder) for value in (frame.fields["id"], frame.size))
    qos = 1 if frame.fields["qos"] is None else frame.fields["qos"]
    return BroadcastRun(frame.fields["channel"], qos, number, [frame.payload or b""], size)


def _add(items: list[Item], item: Item) -> None:
    """Add what was cut; a run goes on with the one before it where that is of the same kind."""
    before = items[-1] if items else None
    if (
        isinstance(item, BroadcastRun)
        and isinstance(before, BroadcastRun)
        and (item.channel, item.qos) == (before.channel, before.qos)
    ):
        items[-1] = BroadcastRun(
            item.channel, item.qos, before.ids + item.ids, before.payloads + item.payloads, before.sizes + item.sizes
        )
    else:
        items.append(item)
