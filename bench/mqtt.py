"""How fast is the MQTT broker, beside mosquitto and amqtt in the same run?

One load generator for all (bench/_mqtt_load.py, a process of its own); deliveries are counted at the receiver.  The
stub copies bytes without looking at them: what the generator itself can do.  Each case starts a fresh broker; turns
alternate and figures are medians.  The CPU column is the broker's own, so that it says something on a busy machine.

    python bench/mqtt.py [--quick] [--json] [--only NAME] [--brokers penstock,mosquitto,amqtt]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _table
from _mqtt_brokers import BROKERS, Broker
from penstock.net import make_development_certificate

LOAD = Path(__file__).resolve().parent / "_mqtt_load.py"

# name → (options of the load, messages for a fast and for a slow broker)
FLOWS: dict[str, tuple[dict[str, Any], int, int]] = {
    "QoS 0, 64 B, 1→1": ({"publishers": 1, "subscribers": 1, "payload": 64}, 3_000_000, 20_000),
    "QoS 0, 1 KiB, 1→1": ({"publishers": 1, "subscribers": 1, "payload": 1024}, 1_000_000, 10_000),
    "QoS 0, 64 B, 1→10": ({"publishers": 1, "subscribers": 10, "payload": 64}, 1_000_000, 5_000),
    "QoS 0, 64 B, 10→1": ({"publishers": 10, "subscribers": 1, "payload": 64}, 3_000_000, 20_000),
    "QoS 0, 64 B, 100→100": ({"groups": 100, "publishers": 1, "subscribers": 1, "payload": 64}, 3_000_000, 20_000),
    "QoS 0, 64 B, no two topics the same": (
        {"publishers": 1, "subscribers": 1, "payload": 64, "many": True, "topic": "many/00000000"},
        1_000_000,
        20_000,
    ),
    "QoS 1, 64 B, 1→1": ({"publishers": 1, "subscribers": 1, "payload": 64, "qos": 1}, 300_000, 5_000),
    "QoS 1, 64 B, 10→1": ({"publishers": 10, "subscribers": 1, "payload": 64, "qos": 1}, 300_000, 5_000),
    "QoS 2, 64 B, 1→1": ({"publishers": 1, "subscribers": 1, "payload": 64, "qos": 2}, 100_000, 3_000),
    "QoS 0, 64 B, 1→1, TLS": ({"publishers": 1, "subscribers": 1, "payload": 64, "wire": "tls"}, 3_000_000, 0),
    "QoS 0, 64 B, 1→1, WebSocket": ({"publishers": 1, "subscribers": 1, "payload": 64, "wire": "ws"}, 300_000, 0),
}
SLOW = {"amqtt"}


def load(case: str, broker: Broker, ca: str, **options: Any) -> dict[str, Any]:
    wire = options.pop("wire", "tcp")
    options |= {"case": case, "port": broker.ports[wire], "ws": wire == "ws", "ca": ca if wire == "tls" else None}
    options["pid"] = broker.process.pid
    done = subprocess.run([sys.executable, str(LOAD), json.dumps(options)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{broker.name}, {case}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    if found["delivered"] < found["expected"]:
        print(f"{broker.name}: {found['delivered']} of {found['expected']} arrived", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--brokers", default="penstock,mosquitto,amqtt")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    scale, rounds = (0.005, 1) if options.quick else (options.scale, options.rounds)
    wanted = options.brokers.split(",")
    for name in wanted:
        if BROKERS[name].missing:
            print(f"left out: {BROKERS[name].missing}", file=sys.stderr)
    wanted = [name for name in wanted if not BROKERS[name].missing]
    rows: list[dict[str, Any]] = []

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        made = make_development_certificate(folder)
        files = (made.certificate, made.key)

        kept: dict[str, Broker] = {}

        @contextlib.contextmanager
        def running(name: str) -> Iterator[Broker]:
            """A fresh broker; the short form uses one for everything."""
            if not options.quick:
                with BROKERS[name](folder, files) as broker:
                    yield broker
                return
            if name not in kept:
                kept[name] = stack.enter_context(BROKERS[name](folder, files))
            yield kept[name]

        def measure(label: str, case: str, brokers: list[str], times: int, **given: Any) -> None:
            if options.only and options.only not in label:
                return
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in brokers}
            for _ in range(times):
                for name in brokers:
                    with running(name) as broker:
                        if given.get("wire", "tcp") in broker.ports:
                            own = {
                                key: value[name in SLOW] if type(value) is tuple else value
                                for key, value in given.items()
                            }
                            found[name].append(load(case, broker, made.certificate, **own))
            for name, turns in found.items():
                if turns:
                    middle = sorted(turns, key=lambda turn: turn.get("rate", turn.get("p99", turn["cpu"])))[
                        len(turns) // 2
                    ]
                    rows.append(
                        {"case": label, "broker": name, **middle, "cpu": statistics.median(t["cpu"] for t in turns)}
                    )
                    print(f"{label:38} {name:10} {json.dumps(rows[-1])}", file=sys.stderr)

        for label, (given, fast, slow) in FLOWS.items():
            plain = not given.get("qos") and "wire" not in given and not given.get("many")
            brokers = [*wanted, *(["stub"] if plain else [])]
            brokers = [name for name in brokers if slow or name not in SLOW]
            measure(
                label,
                "flow",
                brokers,
                rounds,
                **given,
                messages=(max(100, int(fast * scale)), max(100, int(slow * scale))),
            )
        others = [name for name in wanted if name not in SLOW]
        seconds = 1 if options.quick else 10
        measure(
            "fleet: 1,000 clients, 1 message a second each",
            "fleet",
            others,
            1,
            clients=20 if options.quick else 1000,
            rate=1.0,
            payload=64,
            seconds=2 * seconds,
        )
        measure("latency, QoS 0, 1,000/s", "latency", others, rounds, rate=1000, payload=64, seconds=seconds)
        measure("latency, QoS 1, 1,000/s", "latency", others, rounds, rate=1000, payload=64, seconds=seconds, qos=1)
        measure(
            "100,000 retained topics to a new subscriber",
            "retained",
            others,
            rounds,
            topics=max(100, int(100_000 * scale)),
            payload=64,
        )

    if options.json:
        print(json.dumps(rows))
        return
    print_tables(rows)


def print_tables(rows: list[dict[str, Any]]) -> None:
    of: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        of.setdefault(row["case"], {})[row["broker"]] = row

    def ratio(a: float | None, b: float | None) -> str:
        return f"{a / b:.1f}×" if a and b else "–"

    table = []
    for case, found in of.items():
        rates = {name: row["rate"] for name, row in found.items() if "rate" in row}
        if not rates:
            continue
        own, its = rates.get("penstock"), rates.get("mosquitto")
        micro = {name: f"{found[name]['cpu'] / max(1, found[name]['delivered']) * 1e6:.2f} µs" for name in rates}
        table.append(
            [case, *(_table.rate(rates[name]) if name in rates else "–" for name in BROKERS), ratio(own, its),
             micro.get("penstock", "–"), micro.get("mosquitto", "–")]
        )  # fmt: skip
    if table:
        head = [
            "delivered a second",
            "penstock",
            "mosquitto",
            "amqtt",
            "stub: the generator's ceiling",
            "ratio",
            "CPU per delivery",
            "mosquitto's",
        ]
        print(_table.markdown(head, table) + "\n")
    table = []
    for case, found in of.items():
        if any("rate" in row for row in found.values()):
            continue
        line: list[object] = [case]
        for name in ("penstock", "mosquitto"):
            row = found.get(name)
            if row is None:
                line += ["–", "–"]
            elif "p99" in row:
                line += [
                    f"p50 {row['p50']:.0f} µs, p99 {row['p99']:.0f} µs",
                    f"{row['cpu'] / row['delivered'] * 1e6:.0f} µs",
                ]
            else:
                line += ["–", f"{row['cpu'] / row['delivered'] * 1e6:.0f} µs"]
        table.append(line)
    if table:
        print(_table.markdown(["case", "penstock", "CPU a message", "mosquitto", "CPU a message"], table))


if __name__ == "__main__":
    main()
