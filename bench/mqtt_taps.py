"""What does a tap cost?  The same load through a broker without taps and through one whose tap takes everything.

Load and brokers are those of bench/mqtt.py; turns alternate and figures are medians.  The log is counted afterwards: a
figure stands only where it holds every message.  Memory is touched right before each turn: what a virtual machine pays
its host for a page that was never used, or that was given back, is not the tap's.

    python bench/mqtt_taps.py [--quick] [--json] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from typing import Any

import _mqtt_brokers
import _table
from _mqtt_brokers import Penstock
from mqtt import load
from penstock.log import open_log
from penstock.net import make_development_certificate

# name → (options of the load, messages, format of the log)
CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "QoS 0, 64 B, 1→1": ({"publishers": 1, "subscribers": 1, "payload": 64}, 2_000_000, "xchannel"),
    "QoS 0, 64 B, 10→1": ({"publishers": 10, "subscribers": 1, "payload": 64}, 2_000_000, "xchannel"),
    "QoS 0, 64 B, 10→1, 8 million": ({"publishers": 10, "subscribers": 1, "payload": 64}, 8_000_000, "xchannel"),
    "QoS 0, 64 B, no two topics the same": (
        {"publishers": 1, "subscribers": 1, "payload": 64, "many": True, "topic": "many/00000000"},
        500_000,
        "xchannel",
    ),
    "QoS 1, 64 B, 1→1": ({"publishers": 1, "subscribers": 1, "payload": 64, "qos": 1}, 300_000, "xchannel"),
    "QoS 1, 64 B, 10→1": ({"publishers": 10, "subscribers": 1, "payload": 64, "qos": 1}, 300_000, "xchannel"),
    "QoS 2, 64 B, 1→1": ({"publishers": 1, "subscribers": 1, "payload": 64, "qos": 2}, 100_000, "xchannel"),
    "QoS 1, 64 B, 1→1, filechannel": (
        {"publishers": 1, "subscribers": 1, "payload": 64, "qos": 1}, 300_000, "filechannel",
    ),
    "QoS 1, 64 B, 1→1, messagelog": (
        {"publishers": 1, "subscribers": 1, "payload": 64, "qos": 1}, 300_000, "messagelog",
    ),
}  # fmt: skip

ROOM = 4 << 30
"""Bytes that a log, its zeros and the queues of a turn may take."""


class Tapped(Penstock):
    """A broker whose tap takes everything."""

    name = "tapped"
    format = "xchannel"

    def start(self) -> None:
        """Serve with a tap."""
        path = os.path.join(self.folder, "taps.toml")
        with open(path, "w") as file:
            file.write(f'[[taps]]\nfilter = "#"\npath = "{self.folder}/log"\nformat = "{self.format}"\n')
        real = _mqtt_brokers.subprocess.Popen

        def with_tap(command: list[str], **options: Any) -> Any:
            return real([*command, "--config", path], **options)

        _mqtt_brokers.subprocess.Popen = with_tap  # type: ignore[assignment,misc]
        try:
            super().start()
        finally:
            _mqtt_brokers.subprocess.Popen = real  # type: ignore[misc]


def records(path: str) -> int:
    """Return how many records a log has, and remove it."""
    count = 0
    with open_log(path) as log:
        at = log.first_position
        while len(batch := log.read(at)):
            count += len(batch)
            at = batch.next_position
    folder = os.path.dirname(path)
    for name in os.listdir(folder):
        if name.startswith("log"):
            found = os.path.join(folder, name)
            shutil.rmtree(found) if os.path.isdir(found) else os.remove(found)
    return count


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    scale, rounds = (0.005, 1) if options.quick else (options.scale, options.rounds)
    rows: list[dict[str, Any]] = []
    for label, (given, messages, kept_in) in CASES.items():
        if options.only not in label:
            continue
        count = max(100, int(messages * scale))
        rates: dict[str, list[float]] = {"off": [], "on": []}
        cpu: dict[str, list[float]] = {"off": [], "on": []}
        Tapped.format = kept_in
        for _ in range(rounds):
            for name, kind in (("off", Penstock), ("on", Tapped)):
                with tempfile.TemporaryDirectory() as folder:
                    made = make_development_certificate(folder)
                    with kind(folder, (made.certificate, made.key)) as broker:
                        if not options.quick:
                            _table.touch_memory(ROOM)
                        found = load("flow", broker, made.certificate, **given, messages=count)
                    if name == "on" and (kept := records(f"{folder}/log")) < found["delivered"]:
                        raise SystemExit(f"{label}: {kept} in the log, {found['delivered']} delivered")
                    rates[name].append(found["rate"])
                    cpu[name].append(found["cpu"] / max(1, found["delivered"]) * 1e6)
        row: dict[str, Any] = {"case": label, "log": kept_in}
        for name in ("off", "on"):
            row[name], row[f"cpu_{name}"] = statistics.median(rates[name]), statistics.median(cpu[name])
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    if options.json:
        print(json.dumps(rows))
        return
    table = [
        [
            row["case"], _table.rate(row["off"]), _table.rate(row["on"]), f"{row['on'] / row['off']:.2f}",
            f"{row['cpu_off']:.2f} µs", f"{row['cpu_on']:.2f} µs",
        ]
        for row in rows
    ]  # fmt: skip
    head = ["delivered a second", "without taps", "with a tap", "ratio", "CPU per message without", "with"]
    print(_table.markdown(head, table))


if __name__ == "__main__":
    main()
