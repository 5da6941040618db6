"""The load generator of bench/mqtt.py: raw sockets, packets made beforehand, deliveries counted where they arrive.

It speaks MQTT 3.1.1 and runs in a process of its own.  All packets of a case have one length, so that arrivals are
counted by bytes and acknowledgements are made for a whole read at once (numpy); nothing is done per message.  A
publisher stays within a window of what has arrived, so that no broker is measured by what it drops.

    python bench/_mqtt_load.py '{"case": "flow", "port": 1883, …}'        prints one JSON object
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

READ = 1 << 18
BLOCK = 1 << 16


def cpu_of(options: dict[str, Any]) -> float:
    """Return the CPU seconds of the broker so far: finer than its ticks where the scheduler tells."""
    if "pid" not in options:
        return 0.0
    total = 0
    for task in Path(f"/proc/{options['pid']}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack(">H", len(raw)) + raw


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = value >> 7, value & 127
        out.append(low | (128 if value else 0))
        if not value:
            return bytes(out)


def packet(first: int, body: bytes) -> bytes:
    return bytes([first]) + varint(len(body)) + body


def connect_packet(client: str, keep: bool = False) -> bytes:
    return packet(0x10, text("MQTT") + (b"\x04\x00\x00\x00" if keep else b"\x04\x02\x00\x00") + text(client))


def publish_packet(topic: str, payload: bytes, qos: int = 0, retain: bool = False) -> bytes:
    return packet(0x30 | qos << 1 | retain, text(topic) + (b"\0\1" if qos else b"") + payload)


class WebSocket:
    """A blocking handshake, then frames; the mask is zero, so that masking costs the generator nothing."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.sendall(
            b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Protocol: mqtt\r\n\r\n"
        )
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += sock.recv(1)
        if b" 101 " not in answer.splitlines()[0]:
            raise SystemExit(f"no WebSocket: {answer[:100]!r}")
        self.unread = b""

    @staticmethod
    def frame(data: bytes) -> bytes:
        size = len(data)
        if size < 126:
            return bytes([0x82, 0x80 | size]) + b"\0\0\0\0" + data
        return b"\x82\xfe" + struct.pack(">H", size) + b"\0\0\0\0" + data

    def payloads(self, data: bytes) -> bytes:
        data = self.unread + data
        at, found, end = 0, [], len(data)
        while end - at >= 2:
            size, head = data[at + 1], 2
            if size == 126:
                if end - at < 4:
                    break
                size, head = int.from_bytes(data[at + 2 : at + 4], "big"), 4
            elif size == 127:
                if end - at < 10:
                    break
                size, head = int.from_bytes(data[at + 2 : at + 10], "big"), 10
            if end - at < head + size:
                break
            found.append(data[at + head : at + head + size])
            at += head + size
        self.unread = data[at:]
        return b"".join(found)


class Client:
    """One connection."""

    def __init__(self, options: dict[str, Any], name: str) -> None:
        sock = socket.create_connection((options.get("host", "127.0.0.1"), options["port"]), timeout=30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if options.get("ca"):
            context = ssl.create_default_context(cafile=options["ca"])
            sock = context.wrap_socket(sock, server_hostname="localhost")
        self.sock: Any = sock
        self.ws = WebSocket(sock) if options.get("ws") else None
        self.name = name
        self.out = b""
        self.queue: list[bytes] = []
        self.received = 0  # messages
        self.carry = b""
        self.send_now(connect_packet(name, options.get("keep", False)))
        answer = self.read_exactly(4)
        if answer[0] != 0x20 or answer[3] != 0:
            raise SystemExit(f"refused: {answer.hex()}")

    def send_now(self, data: bytes) -> None:
        self.sock.sendall(self.ws.frame(data) if self.ws else data)

    def read_exactly(self, size: int) -> bytes:
        while len(self.carry) < size:
            data = self.sock.recv(READ)
            if not data:
                raise SystemExit(f"{self.name}: the broker closed the connection")
            self.carry += self.ws.payloads(data) if self.ws else data
        found, self.carry = self.carry[:size], self.carry[size:]
        return found

    def subscribe(self, topic: str, qos: int) -> None:
        self.send_now(packet(0x82, b"\0\1" + text(topic) + bytes([qos])))
        answer = self.read_exactly(5)
        if answer[0] != 0x90 or answer[4] > 2:
            raise SystemExit(f"no subscription: {answer.hex()}")

    def receive(self) -> bytes | None:
        """Return what is there, None where nothing is."""
        try:
            data = self.sock.recv(READ)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        if not data:
            raise SystemExit(f"{self.name}: the broker closed the connection")
        return self.ws.payloads(data) if self.ws else data

    def flush(self) -> bool:
        """Send what waits; return whether all of it went."""
        while self.out or self.queue:
            if not self.out:
                self.out = memoryview(b"".join(self.queue))  # type: ignore[assignment]
                self.queue = []
            try:
                sent = self.sock.send(self.out)
            except (BlockingIOError, ssl.SSLWantWriteError):
                return False
            self.out = self.out[sent:]
        return True


def acks_for(first: int, ids: np.ndarray) -> bytes:
    found = np.empty((len(ids), 4), np.uint8)
    found[:, 0], found[:, 1], found[:, 2:] = first, 2, ids
    return found.tobytes()


class Subscriber(Client):
    """Counts messages by bytes and answers QoS 1 and 2."""

    def __init__(self, options: dict[str, Any], name: str, topic: str, size: int, first: bytes, at: int) -> None:
        super().__init__(options, name)
        self.qos = options.get("qos", 0)
        self.size, self.first, self.at = size, np.frombuffer(first, np.uint8), at
        self.subscribe(topic, self.qos)

    def take(self, data: bytes) -> None:
        if not self.qos:
            total = len(self.carry) + len(data)
            self.received += total // self.size
            self.carry = b"." * (total % self.size)
            return
        data = self.carry + data if self.carry else data
        view, at = np.frombuffer(data, np.uint8), 0
        while True:
            left = len(view) - at
            if left >= 4 and view[at] == 0x62:
                rows = view[at : at + left // 4 * 4].reshape(-1, 4)
                other = np.flatnonzero(rows[:, 0] != 0x62)
                count = int(other[0]) if len(other) else len(rows)
                self.queue.append(acks_for(0x70, rows[:count, 2:4]))
                at += count * 4
            elif left >= self.size:
                rows = view[at : at + left // self.size * self.size].reshape(-1, self.size)
                other = np.flatnonzero((rows[:, 0] & 0xF6) != self.first[0])
                count = int(other[0]) if len(other) else len(rows)
                if not count:
                    raise SystemExit(f"{self.name}: unexpected packet {data[at : at + 8].hex()}")
                self.queue.append(acks_for(0x40 if self.qos == 1 else 0x50, rows[:count, self.at : self.at + 2]))
                self.received += count
                at += count * self.size
            else:
                break
        self.carry = data[at:]


class Publisher(Client):
    """Sends packets made beforehand, and finishes QoS 1 and 2."""

    def __init__(self, options: dict[str, Any], name: str, table: np.ndarray, total: int, qos: int) -> None:
        super().__init__(options, name)
        self.table, self.total, self.qos = table, total, qos
        self.sent = self.done = self.at = 0
        self.size = table.shape[1]

    def more(self, room: int) -> None:
        """Queue up to a block of messages."""
        count = min(room, self.total - self.sent, max(1, BLOCK // self.size))
        if self.qos:
            count = min(count, 40_000 - (self.sent - self.done))
        while count > 0:
            step = min(count, len(self.table) - self.at)
            data = self.table[self.at : self.at + step].tobytes()
            if self.ws:
                data = b"".join(self.ws.frame(data[each : each + self.size]) for each in range(0, len(data), self.size))
            self.queue.append(data)
            self.at = (self.at + step) % len(self.table)
            self.sent += step
            count -= step

    def take(self, data: bytes) -> None:
        data = self.carry + data if self.carry else data
        whole = len(data) // 4 * 4
        self.carry = data[whole:]
        rows = np.frombuffer(data[:whole], np.uint8).reshape(-1, 4)
        first = rows[:, 0]
        if self.qos == 1:
            self.done += int((first == 0x40).sum())
        else:
            asked = rows[first == 0x50]
            if len(asked):
                self.queue.append(acks_for(0x62, asked[:, 2:4]))
            self.done += int((first == 0x70).sum())


def numbered(frame: bytes, at: int, count: int) -> np.ndarray:
    """Return frames with packet ids 1 … count."""
    table = np.tile(np.frombuffer(frame, np.uint8), (count, 1))
    ids = np.arange(1, count + 1, dtype=np.uint16)
    table[:, at], table[:, at + 1] = ids >> 8, ids & 255
    return table


def with_topics(frame: bytes, at: int, digits: int, count: int) -> np.ndarray:
    """Return frames whose topics count up in decimal digits at that place."""
    table = np.tile(np.frombuffer(frame, np.uint8), (count, 1))
    number = np.arange(count)
    for place in range(digits):
        table[:, at + digits - 1 - place] = 48 + number // 10**place % 10
    return table


def flow(options: dict[str, Any]) -> dict[str, Any]:
    """Many messages as fast as they are taken: publishers × subscribers in groups, one topic a group."""
    qos, payload = options.get("qos", 0), b"x" * options["payload"]
    groups = options.get("groups", 1)
    subscribers: list[list[Subscriber]] = []
    publishers: list[list[Publisher]] = []
    per_publisher = options["messages"] // (groups * options["publishers"])
    for group in range(groups):
        topic = options.get("topic") or f"bench/{group:04}"
        frame = publish_packet(topic, payload, qos)
        head = len(frame) - len(payload)
        if options.get("many"):
            table = with_topics(frame, head - 8, 8, min(per_publisher, 1_000_000))
        elif qos:
            table = numbered(frame, head - 2, 65_535)
        else:
            table = np.tile(np.frombuffer(frame, np.uint8), (max(1, BLOCK // len(frame)), 1))
        wanted = topic.rpartition("/")[0] + "/#" if options.get("many") else topic
        subscribers.append(
            [
                Subscriber(options, f"sub-{group}-{each}", wanted, len(frame), frame[:1], head - 2)
                for each in range(options["subscribers"])
            ]
        )
        publishers.append(
            [
                Publisher(options, f"pub-{group}-{each}", table, per_publisher, qos)
                for each in range(options["publishers"])
            ]
        )
    everyone: list[Any] = [client for group in (*subscribers, *publishers) for client in group]
    poll = select.epoll()
    by_fd = {}
    for client in everyone:
        client.sock.setblocking(False)
        by_fd[client.sock.fileno()] = client
        poll.register(client.sock.fileno(), select.EPOLLIN)
    window = options.get("window", 20_000)
    target = per_publisher * options["publishers"]
    tls = bool(options.get("ca"))
    cpu = cpu_of(options)
    begin = last = time.perf_counter()
    deadline = begin + options.get("seconds", 60)
    writing: set[int] = set()
    while True:
        now = time.perf_counter()
        short = [sub for group in subscribers for sub in group if sub.received < target]
        if not short:
            break
        if now > deadline or now - last > 10:
            break
        idle = True
        for group_subs, group_pubs in zip(subscribers, publishers, strict=True):
            arrived = min((sub.received for sub in group_subs), default=sum(pub.done for pub in group_pubs))
            room = window - (sum(pub.sent for pub in group_pubs) - arrived)
            for pub in group_pubs:
                if room >= window // 2 and not pub.out and not pub.queue and pub.sent < pub.total:
                    pub.more(max(1, room // len(group_pubs)))
                    idle = False
        for client in everyone:
            if client.out or client.queue:
                fd = client.sock.fileno()
                if client.flush():
                    if fd in writing:
                        writing.discard(fd)
                        poll.modify(fd, select.EPOLLIN)
                elif fd not in writing:
                    writing.add(fd)
                    poll.modify(fd, select.EPOLLIN | select.EPOLLOUT)
        for fd, event in poll.poll(0.5 if idle else 0):
            client = by_fd[fd]
            if not event & ~select.EPOLLOUT:
                continue
            for _ in range(8 if tls else 2):
                data = client.receive()
                if not data:
                    break
                client.take(data)
                last = time.perf_counter()
    seconds = time.perf_counter() - begin
    delivered = sum(sub.received for group in subscribers for sub in group)
    expected = target * sum(len(group) for group in subscribers)
    cpu = cpu_of(options) - cpu
    return {"seconds": seconds, "delivered": delivered, "expected": expected, "rate": delivered / seconds, "cpu": cpu}


def fleet(options: dict[str, Any]) -> dict[str, Any]:
    """Many clients that each send a small message now and then, spread evenly; one subscriber hears them all."""
    count, rate, seconds = options["clients"], options["rate"], options["seconds"]
    payload = b"x" * options["payload"]
    frames = [publish_packet(f"fleet/{each:05}", payload) for each in range(count)]
    subscriber = Subscriber(options, "sub", "fleet/#", len(frames[0]), frames[0][:1], 0)
    clients = [Client(options, f"dev-{each}") for each in range(count)]
    subscriber.sock.setblocking(False)
    cpu = cpu_of(options)
    begin = time.perf_counter()
    sent, total = 0, int(rate * count * seconds)
    while sent < total:
        due = min(total, int((time.perf_counter() - begin) * rate * count))
        while sent < due:
            clients[sent % count].sock.send(frames[sent % count])
            sent += 1
        while data := subscriber.receive():
            subscriber.take(data)
        time.sleep(0.0005)
    ended = time.perf_counter()
    while subscriber.received < total and time.perf_counter() - ended < 10:
        data = subscriber.receive()
        if data:
            subscriber.take(data)
    cpu = cpu_of(options) - cpu
    return {"seconds": ended - begin, "delivered": subscriber.received, "expected": total, "cpu": cpu}


def latency(options: dict[str, Any]) -> dict[str, Any]:
    """One publisher at a fixed rate; each message carries the time it was sent."""
    qos, rate, seconds = options.get("qos", 0), options["rate"], options["seconds"]
    payload = bytes(options["payload"])
    frame = bytearray(publish_packet("bench/latency", payload, qos))
    head = len(frame) - len(payload)
    subscriber = Subscriber(options, "sub", "bench/latency", len(frame), bytes(frame[:1]), head - 2)
    publisher = Client(options, "pub")
    for client in (subscriber, publisher):
        client.sock.setblocking(False)
    times: list[int] = []
    carry = b""
    cpu = cpu_of(options)
    begin = time.perf_counter()
    sent, total, size = 0, int(rate * seconds), len(frame)
    poll = select.epoll()
    poll.register(subscriber.sock.fileno(), select.EPOLLIN)
    while len(times) < total and time.perf_counter() - begin < seconds + 10:
        now = time.perf_counter()
        due = begin + sent / rate
        if sent < total and now >= due:
            if qos:
                struct.pack_into(">H", frame, head - 2, sent % 65_535 + 1)
            struct.pack_into("<Q", frame, head, time.perf_counter_ns())
            publisher.sock.send(bytes(frame))
            sent += 1
            continue
        if not poll.poll(max(0.0, min(due - now, 0.05))):
            continue
        data = subscriber.receive()
        if data is None:
            continue
        arrived = time.perf_counter_ns()
        carry += data
        whole = len(carry) // size * size
        times += [arrived - struct.unpack_from("<Q", carry, at + head)[0] for at in range(0, whole, size)]
        if qos:
            rows = np.frombuffer(carry[:whole], np.uint8).reshape(-1, size)
            subscriber.send_now(acks_for(0x40, rows[:, head - 2 : head]))
            publisher.receive()
        carry = carry[whole:]
    if not times:
        raise SystemExit("nothing arrived")
    found, cpu = np.array(times) / 1e3, cpu_of(options) - cpu
    return {"cpu": cpu, "delivered": len(times), "expected": total, "p50": float(np.percentile(found, 50)),
            "p99": float(np.percentile(found, 99)), "p999": float(np.percentile(found, 99.9))}  # fmt: skip


def retained(options: dict[str, Any]) -> dict[str, Any]:
    """Fill topics with retained messages, then subscribe to all of them."""
    count, payload = options["topics"], b"x" * options["payload"]
    frame = publish_packet(f"kept/{0:08}", payload, 0, True)
    table = with_topics(frame, len(frame) - len(payload) - 8, 8, count)
    publisher = Client(options, "pub")
    begin = time.perf_counter()
    publisher.send_now(table.tobytes())
    publisher.send_now(b"\xc0\x00")
    publisher.read_exactly(2)
    stored = time.perf_counter() - begin
    cpu = cpu_of(options)
    begin = time.perf_counter()
    subscriber = Client(options, "sub")
    subscriber.subscribe("kept/#", 0)
    got = len(subscriber.carry)
    while got < count * len(frame) and time.perf_counter() - begin < 60:
        got += len(subscriber.sock.recv(READ))
    seconds, cpu = time.perf_counter() - begin, cpu_of(options) - cpu
    return {"cpu": cpu, "seconds": seconds, "delivered": got // len(frame), "expected": count, "stored": stored,
            "rate": got / len(frame) / seconds}  # fmt: skip


CASES = {"flow": flow, "fleet": fleet, "latency": latency, "retained": retained}

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps(CASES[given.pop("case")](given)))
