"""The client's side of one connection: requests with numbers, answers to them, and what the channels say.

Sans-IO but for the futures that requests wait on: ``received`` cuts a read, ``out`` is what to write.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Final, TypeVar

from penstock import kernel
from penstock.channels.wire.cutter import AckRun, Cutter, Fault, MessageRun, cut_client_run
from penstock.channels.wire.frames import Frame, encode_checked, encode_frame
from penstock.errors import NotConnected, Refused
from penstock.net import Connection

__all__ = ["Dialogue"]

T = TypeVar("T")

SILENT: Final = 3
"""How many heartbeats a server may be silent: it speaks after one when nothing else is said."""

ABANDONED_SECONDS: Final = 30.0
"""After how long a request that nobody waits for counts as answered: longer than servers keep one (20 s)."""

ANSWERS: Final = {"GET_CHAN_LEN": "CHAN_LEN", "GET_CHAN_ACL": "CHAN_ACL", "GET_CHAN_CONFIG": "CHAN_CONFIG"}
"""What answers a request that is not answered by its own name and ``_ACK``."""

HANDSHAKES: Final = frozenset({"CONNECT_ACK", "IDENTIFY_ACK", "AUTH_ACK", "S2M_CONNECT_ACK", "M2S_CONNECT_ACK"})


class Dialogue:
    """One connection of a client, as ``net`` sees it."""

    def __init__(
        self, peer: str, hear: Callable[[MessageRun | Frame], None], lost: Callable[[Dialogue, str], None]
    ) -> None:
        self._peer, self._hear, self._lost = peer, hear, lost
        self._cutter = Cutter(1 << 20, 1 << 30, cut_client_run)
        self._connection: Connection
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._runs: dict[int, tuple[asyncio.Future[list[int]], list[int], int]] = {}  # last id → future, numbers, size
        self._run_of: dict[int, int] = {}  # id → last id of its run
        self._history: dict[str, list[Frame]] = {}
        self._history_names = itertools.count(1)
        self._handshake: asyncio.Future[Frame] | None = None
        self._next_id = 1
        self._slots = asyncio.Semaphore(100)
        self._run_turn = asyncio.Lock()
        """Held by the run that takes its slots: two that have some each would wait for each other."""
        self._max_line = self._max_payload = 1 << 32
        self._writable = asyncio.Event()
        self.gone = asyncio.Event()
        """Set when the connection is gone."""
        self._writable.set()
        self.closed_reason: str | None = None
        self._silence: float | None = None

    # --- What the connection says

    def opened(self, connection: Connection) -> None:
        """Keep the connection."""
        self._connection = connection

    def received(self, data: bytes) -> None:
        """Take what a server sent."""
        for item in self._cutter.feed(data):
            if isinstance(item, MessageRun):
                self._hear(item)
            elif isinstance(item, AckRun):
                for number, seq in zip(item.ids, item.seqs, strict=True):
                    self._acked(number, seq)
            elif isinstance(item, Frame):
                self._frame(item)
            elif isinstance(item, Fault):
                self._connection.abort(f"{self._peer} broke the protocol: {item.detail}")

    def congested(self) -> None:
        """Let requests wait."""
        self._writable.clear()

    def writable(self) -> None:
        """Let requests go on."""
        self._writable.set()

    def expired(self) -> None:
        """End a connection over which nothing came for so long: the server is gone, and nobody said so."""
        self._connection.abort("the server is silent")

    def closed(self, reason: str) -> None:
        """Fail what waits for an answer: nobody knows whether it was done."""
        self.closed_reason = reason
        self.gone.set()
        error = NotConnected(f"{self._peer}: {reason}")
        for future in [*self._waiting.values(), *(run[0] for run in self._runs.values()), self._handshake]:
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # whoever waited may have gone
        self._writable.set()
        self._lost(self, reason)

    # --- Requests

    def set_limits(self, said: dict[str, Any]) -> None:
        """Learn from the answer to CONNECT what the other side takes, and how often it speaks at the least."""
        self._slots = asyncio.Semaphore(max(1, said["max_inflight_requests"]))
        self._max_line, self._max_payload = said["max_message_size"], said["max_payload_size"]
        if said["heartbeat_interval"]:
            self._silence = SILENT * said["heartbeat_interval"] / 1000
            self._connection.set_deadline(self._silence)

    def _encoded(self, name: str, fields: dict[str, Any], payload: bytes | None = None) -> bytes:
        """Return a message that the other side takes.

        One that it would not take ends the connection, and with it what others asked over it.
        """
        data = encode_checked(name, fields, payload)
        if len(data) - (0 if payload is None else len(payload) + 1) > self._max_line:
            raise Refused("POLICY_VIOLATION", "max message size exceeded")
        if payload is not None and len(payload) > self._max_payload:
            raise Refused("POLICY_VIOLATION", "payload too large")
        return data

    def pause(self) -> None:
        """Read no more for now; that nothing comes means nothing then."""
        self._connection.set_deadline(None)
        self._connection.pause_reading()

    def go_on(self) -> None:
        """Read again."""
        self._connection.resume_reading()
        self._connection.set_deadline(self._silence)

    async def shake_hands(self, name: str, **fields: Any) -> Frame:
        """Ask what has no number: CONNECT, IDENTIFY, AUTH."""
        self._check()
        data = self._encoded(name, fields)
        self._handshake = asyncio.get_running_loop().create_future()
        self._connection.write(data)
        return self._checked(name, await self._handshake)

    async def ask(self, name: str, payload: bytes | None = None, **fields: Any) -> Frame:
        """Ask one thing and return the answer; Refused if the rules say no.

        Who is cancelled asks no more, but its slot is free only when the answer comes: the other side counts as well,
        and ends a connection that has too much under way.
        """
        slots = self._slots
        await slots.acquire()
        try:
            await self._writable.wait()
            self._check()
            number = self._number()
            data = self._encoded(name, {"id": number, **fields}, payload)
            self._connection.write(data)
        except BaseException:
            slots.release()
            raise
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

        def answered(_: object) -> None:
            del self._waiting[number]
            slots.release()

        self._waiting[number] = future
        future.add_done_callback(answered)
        return self._checked(name, await self._answer_to(future))

    def _checked(self, name: str, answer: Frame) -> Frame:
        """Return an answer if it is one to what was asked."""
        if answer.name != ANSWERS.get(name, f"{name}_ACK"):
            why = f"{self._peer} answered {name} with {answer.name}"
            self._connection.abort(why)
            raise NotConnected(why)
        return answer

    @staticmethod
    async def _answer_to(future: asyncio.Future[T]) -> T:
        """Wait for an answer; who is cancelled leaves the request under way, though not for ever."""
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(ABANDONED_SECONDS, future.cancel)
            raise

    async def history(self, channel: str, from_seq: int, limit: int) -> list[Frame]:
        """Ask for stored messages."""
        name = f"h{next(self._history_names)}"
        self._history[name] = []
        try:
            await self.ask("HISTORY", channel=channel, from_seq=from_seq, history_id=name, limit=limit)
            return self._history[name]
        finally:
            del self._history[name]

    async def broadcast_run(self, channel: str, payloads: tuple[bytes, ...], qos: int) -> list[int]:
        """Send broadcasts in one write and return their numbers; their slots are free when they are answered."""
        slots, taken = self._slots, 0
        try:
            async with self._run_turn:
                for _ in payloads:
                    await slots.acquire()
                    taken += 1
            await self._writable.wait()
            self._check()
            ids, data = self._encoded_run(channel, payloads, qos)
            self._connection.write(data)
        except BaseException:
            for _ in range(taken):
                slots.release()
            raise
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

        def answered(_: object) -> None:
            del self._runs[ids[-1]]
            for number in ids:
                del self._run_of[number]
                slots.release()

        self._runs[ids[-1]] = future, [], len(ids)
        self._run_of.update(dict.fromkeys(ids, ids[-1]))
        future.add_done_callback(answered)
        return await self._answer_to(future)

    def _encoded_run(self, channel: str, payloads: tuple[bytes, ...], qos: int) -> tuple[range, bytes]:
        """Return the ids of broadcasts, in a row, and their bytes."""
        if self._next_id + len(payloads) > 1 << 32:
            self._next_id = 1
        ids = range(self._next_id, self._next_id + len(payloads))
        for payload in (min(payloads, key=len), max(payloads, key=len)):
            self._encoded("BROADCAST", {"id": ids[-1], "channel": channel, "qos": qos}, payload)
        head, tail = f" channel={channel} length=".encode(), f" qos={qos}\n".encode()
        self._next_id = ids.stop if ids.stop < 1 << 32 else 1
        return ids, kernel.channelwire.encode_broadcasts(ids.start, head, tail, payloads)

    def _number(self) -> int:
        number, self._next_id = self._next_id, self._next_id + 1
        if self._next_id >= 1 << 32:
            self._next_id = 1
        return number

    def _check(self) -> None:
        if self.closed_reason is not None:
            raise NotConnected(f"{self._peer}: {self.closed_reason}")

    # --- Answers

    def _acked(self, number: int, seq: int) -> None:
        last = self._run_of.get(number)
        if last is not None:
            future, seqs, size = self._runs[last]
            seqs.append(seq)
            if len(seqs) == size and not future.done():
                future.set_result(seqs)
        elif number in self._waiting and not self._waiting[number].done():
            self._waiting[number].set_result(Frame("BROADCAST_ACK", {"id": number, "seq": seq}))

    def _frame(self, frame: Frame) -> None:
        name = frame.name
        if name == "PING":
            self._connection.write(encode_frame("PONG", {"id": frame.fields["id"]}))
        elif name in HANDSHAKES:
            if self._handshake is not None and not self._handshake.done():
                self._handshake.set_result(frame)
        elif name in ("JOIN_ACK", "RESUME_ACK"):
            self._hear(frame)  # it says where the channel is, before the messages behind it
            self._answer(frame)
        elif name == "ERROR":
            self._error(frame)
        elif name == "MESSAGE":
            asked = frame.fields["history_id"]
            if asked is None:
                self._hear(frame)
            elif asked in self._history:  # or whoever asked has given up: it is no news
                self._history[asked].append(frame)
        elif name in ("EVENT", "MOD_DIRECT"):
            self._hear(frame)
        elif name == "BROADCAST_ACK":
            self._acked(frame.fields["id"], frame.fields["seq"])
        else:
            self._answer(frame)

    def _answer(self, frame: Frame) -> None:
        future = self._waiting.get(frame.id or 0)
        if future is not None and not future.done():
            future.set_result(frame)

    def _error(self, frame: Frame) -> None:
        error = Refused(frame.fields["reason"], frame.fields["detail"])
        number = frame.id
        future: asyncio.Future[Any] | None = None
        if number is None:
            future = self._handshake
            if future is None or future.done():
                self._connection.close(str(error))  # the server ends this connection, and said why
                return
        elif number in self._run_of:
            future = self._runs[self._run_of[number]][0]
        else:
            future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()
