"""What does it cost the MQTT broker to forget nothing, beside mosquitto that keeps everything in memory?

Flows are QoS 1 and 2 between sessions that outlive their connections: every message, packet id and acknowledgement is
kept.  Then: what a publish writes when 100 sessions are away, how fast a client that was away gets 100,000 messages,
how long a start takes, and how many acknowledged messages are gone after kill -9.

    python bench/mqtt_durable.py [--quick] [--json] [--only flow,offline,reconnect,start,kill]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _table
from _mqtt_brokers import Broker, Mosquitto, Penstock
from _mqtt_load import connect_packet, packet, publish_packet, text
from mqtt import load
from penstock.net import make_development_certificate

MODES = ("memory", "none", "interval", "always")
FLOWS: dict[str, tuple[dict[str, Any], int]] = {
    "QoS 1, 64 B, 1→1": ({"publishers": 1, "subscribers": 1, "payload": 64, "qos": 1}, 400_000),
    "QoS 2, 64 B, 1→1": ({"publishers": 1, "subscribers": 1, "payload": 64, "qos": 2}, 150_000),
    "QoS 1, 64 B, 100 clients → 100": (
        {"groups": 100, "publishers": 1, "subscribers": 1, "payload": 64, "qos": 1, "window": 200},
        400_000,
    ),
}


class DurableMosquitto(Mosquitto):
    """Mosquitto as one sets it up so that state survives: saved every second."""

    def start(self) -> None:
        super().start()
        self.process.kill()
        self.process.wait()
        path = Path(self.folder) / "mosquitto.conf"
        store = Path(self.folder) / "mosquitto-data"
        store.mkdir(exist_ok=True)
        store.chmod(0o777)
        kept = f"persistence true\npersistence_location {store}/\nautosave_interval 1\n"
        path.write_text(path.read_text().replace("persistence false\n", kept))
        self.process = subprocess.Popen(["mosquitto", "-c", str(path)], stderr=subprocess.DEVNULL)


class Bench:
    def __init__(self, folder: str, scale: float) -> None:
        self.folder, self.scale = folder, scale
        made = make_development_certificate(folder)
        self.certificate, self.files = made.certificate, (made.certificate, made.key)
        self.data = os.path.join(folder, "data")
        self.rows: list[dict[str, Any]] = []

    def broker(self, mode: str, *, fresh: bool = True) -> Broker:
        if fresh:
            shutil.rmtree(self.data, ignore_errors=True)
        if mode == "mosquitto":
            return Mosquitto(self.folder, self.files)
        if mode == "mosquitto, saved every second":
            return DurableMosquitto(self.folder, self.files)
        broker = Penstock(self.folder, self.files)
        if mode != "memory":
            broker.words = ("--data", self.data, "--sync", mode)
        return broker

    def note(self, **row: Any) -> None:
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr)

    def count(self, number: int) -> int:
        return max(200, int(number * self.scale))

    # --- Flows

    def flow(self) -> None:
        peers = ("mosquitto",) if not Mosquitto.missing else ()
        for label, (given, messages) in FLOWS.items():
            for mode in (*MODES, *peers):
                many = self.count(messages // 20 if mode == "mosquitto" else messages)
                with self.broker(mode) as broker:
                    found = load("flow", broker, self.certificate, **given, messages=many, keep=True, seconds=120)
                self.note(what="flow", case=label, mode=mode, rate=found["rate"], cpu=found["cpu"] / found["delivered"])

    # --- Sessions that are away

    def offline(self) -> None:
        messages, size = self.count(20_000), 1024
        with self.broker("interval") as broker:
            port = broker.ports["tcp"]
            for number in range(100):
                with client(port, f"away-{number}") as sock:
                    subscribe(sock, "away")
            before = written(broker)
            with client(port, "pub") as sock:
                rate = publish_all(sock, "away", size, messages)
            each = (written(broker) - before) / messages
        self.note(what="offline", messages=messages, payload=size, written=each, rate=rate)

    def reconnect(self) -> None:
        messages = self.count(100_000)
        with self.broker("interval") as broker:
            port = broker.ports["tcp"]
            with client(port, "away") as sock:
                subscribe(sock, "away")
            with client(port, "pub") as sock:
                publish_all(sock, "away", 64, messages)
            begin = time.perf_counter()
            with client(port, "away") as sock:
                receive_all(sock, messages, len(publish_packet("away", bytes(64), 1)))
            seconds = time.perf_counter() - begin
        self.note(what="reconnect", messages=messages, seconds=seconds)

    # --- Starting again

    def start(self) -> None:
        sessions, each, queued = self.count(100_000), 10, self.count(1_000_000)
        shutil.rmtree(self.data, ignore_errors=True)
        maker = Path(__file__).resolve().parent / "_mqtt_state.py"
        command = [sys.executable, str(maker), self.data, str(sessions), str(each), str(queued)]
        subprocess.run(command, check=True)
        for how in ("after kill -9", "after a stop"):
            begin = time.perf_counter()
            broker = self.broker("interval", fresh=False)
            with broker:
                seconds = time.perf_counter() - begin
                memory = peak(broker)
            size = sum(each.stat().st_size for each in Path(self.data).rglob("*") if each.is_file())
            self.note(what="start", how=how, sessions=sessions, subscriptions=sessions * each, queued=queued,
                      seconds=seconds, peak=memory, disk=size)  # fmt: skip

    # --- What is lost

    def kill(self) -> None:
        peers = ("mosquitto, saved every second",) if not Mosquitto.missing else ()
        for mode in ("interval", "always", *peers):
            lost = []
            for turn in range(2 if self.scale < 0.1 else 5):
                broker = self.broker(mode)
                shutil.rmtree(os.path.join(self.folder, "mosquitto-data"), ignore_errors=True)
                with broker:
                    port = broker.ports["tcp"]
                    with client(port, "away") as sock:
                        subscribe(sock, "away")
                    time.sleep(1.5)  # mosquitto has saved the session
                    with client(port, "pub") as sock:
                        publish_all(sock, "away", 64, 2_000)
                    time.sleep(0.5 * turn)
                    broker.process.kill()
                    broker.process.wait()
                again = self.broker(mode, fresh=False)
                with again, client(again.ports["tcp"], "away", present=None) as sock:
                    came = receive_all(sock, 2_000, len(publish_packet("away", bytes(64), 1)), patience=2.0)
                lost.append(2_000 - came)
            self.note(what="kill", mode=mode, messages=2_000, lost=lost)


# --- Small clients


@contextlib.contextmanager
def client(port: int, name: str, present: bool | None = None) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(connect_packet(name, True))
        answer = read_exactly(sock, 4)
        assert answer[3] == 0, answer
        assert present is None or answer[2] == present
        yield sock


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        some = sock.recv(size - len(data))
        assert some, "the broker closed the connection"
        data += some
    return data


def subscribe(sock: socket.socket, topic: str) -> None:
    sock.sendall(packet(0x82, b"\0\1" + text(topic) + b"\1"))
    assert read_exactly(sock, 5)[4] == 1


def publish_all(sock: socket.socket, topic: str, size: int, messages: int) -> float:
    """Publish with QoS 1, a window at a time; return messages a second."""
    frame = bytearray(publish_packet(topic, bytes(size), 1))
    at = len(frame) - size - 2
    begin, sent = time.perf_counter(), 0
    while sent < messages:
        some = min(500, messages - sent)
        out = []
        for number in range(some):
            frame[at : at + 2] = ((sent + number) % 65535 + 1).to_bytes(2, "big")
            out.append(bytes(frame))
        sock.sendall(b"".join(out))
        read_exactly(sock, 4 * some)
        sent += some
    return messages / (time.perf_counter() - begin)


def receive_all(sock: socket.socket, messages: int, size: int, patience: float = 60.0) -> int:
    """Receive and acknowledge QoS 1; return how many came."""
    sock.settimeout(patience)
    came, data = 0, b""
    with contextlib.suppress(TimeoutError):
        while came < messages:
            some = sock.recv(1 << 18)
            if not some:
                break
            data += some
            whole = len(data) // size
            head = size - 64 - 2
            acks = [b"\x40\x02" + data[each * size + head : each * size + head + 2] for each in range(whole)]
            sock.sendall(b"".join(acks))
            data = data[whole * size :]
            came += whole
    return came


def written(broker: Broker) -> int:
    """Return the bytes a broker has given to write calls of any kind but sockets."""
    found = Path(f"/proc/{broker.process.pid}/io").read_text()
    return int(found.split("wchar:")[1].split()[0])


def peak(broker: Broker) -> int:
    found = Path(f"/proc/{broker.process.pid}/status").read_text()
    return int(found.split("VmHWM:")[1].split()[0]) << 10


def print_tables(rows: list[dict[str, Any]]) -> None:
    flows: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["what"] == "flow":
            flows.setdefault(row["case"], {})[row["mode"]] = row["rate"]
    if flows:
        table = []
        for case, found in flows.items():
            its = found.get("mosquitto")
            ratio = [f"{found[mode] / its:.1f}×" if its else "–" for mode in ("interval", "always")]
            line = [_table.rate(found[mode]) if mode in found else "–" for mode in (*MODES, "mosquitto")]
            table.append([case, *line, *ratio])
        head = ["delivered a second, kept sessions", *MODES, "mosquitto in memory", "interval ÷ its", "always ÷ its"]
        print(_table.markdown(head, table) + "\n")
    for row in rows:
        if row["what"] == "offline":
            print(
                f"1→100 sessions away, {row['payload']} B: {row['written']:.0f} B written a publish, "
                f"{row['rate']:,.0f} publishes a second\n"
            )
        elif row["what"] == "reconnect":
            print(f"reconnect: {row['messages']:,} queued messages in {row['seconds']:.2f} s\n")
    starts = [row for row in rows if row["what"] == "start"]
    if starts:
        table = [
            [row["how"], f"{row['sessions']:,}", f"{row['subscriptions']:,}", f"{row['queued']:,}",
             f"{row['seconds']:.1f} s", f"{row['peak'] / 1e6:,.0f} MB", f"{row['disk'] / 1e6:,.0f} MB"]
            for row in starts
        ]  # fmt: skip
        head = ["start", "sessions", "subscriptions", "queued", "until ready", "peak memory", "on disk"]
        print(_table.markdown(head, table) + "\n")
    kills = [row for row in rows if row["what"] == "kill"]
    if kills:
        table = [[row["mode"], f"{row['messages']:,}", ", ".join(map(str, row["lost"]))] for row in kills]
        print(_table.markdown(["kill -9", "acknowledged", "lost, kill by kill"], table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", default="flow,offline,reconnect,start,kill")
    options = parser.parse_args()
    if Mosquitto.missing:
        print(f"left out: {Mosquitto.missing}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder, 0.01 if options.quick else options.scale)
        for name in options.only.split(","):
            getattr(bench, name)()
    if options.json:
        print(json.dumps(bench.rows))
    else:
        print_tables(bench.rows)


if __name__ == "__main__":
    main()
