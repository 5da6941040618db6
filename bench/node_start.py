"""How long does a node with many channels and sessions take to start, and what does it cost while nothing happens?

    python bench/node_start.py --channels 1000 --sessions 100000

Everything is kept by a first node, which is stopped; then a second one is started on the same data directory, timed to
its ready line, and left alone while its processor time and memory are read from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from penstock.node import IngestWriter

SIDE_BY_SIDE = 64


def serve(data: str, config: str) -> tuple[subprocess.Popen[str], dict[str, Any], float]:
    command = [
        sys.executable, "-m", "penstock.cli.main", "serve", "--data", data, "--config", config, "--port", "0",
        "--channels-port", "0", "--http-port", "0", "--json",
    ]  # fmt: skip
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    return process, ready, time.monotonic() - began


async def connect_all(address: str, count: int) -> None:
    host, _, port = address.rpartition(":")
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            reader, writer = await asyncio.open_connection(host, int(port))
            name = b"device-%06d" % number
            body = b"\x00\x04MQTT\x04\x00\x00\x3c" + len(name).to_bytes(2, "big") + name
            topic = b"to/%06d" % number
            asked = b"\x00\x01" + len(topic).to_bytes(2, "big") + topic + b"\x01"
            writer.write(bytes((0x10, len(body))) + body + bytes((0x82, len(asked))) + asked)
            await reader.readexactly(9)
            writer.write(b"\xe0\x00")
            writer.close()
            await writer.wait_closed()

    await asyncio.gather(*(work() for _ in range(SIDE_BY_SIDE)))


def processor_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(120)
    assert process.stdout is not None
    process.stdout.close()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--channels", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--idle", type=float, default=30.0, help="seconds")
    parser.add_argument("--quick", action="store_true", help="a few of each, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.channels, options.sessions, options.idle = 5, 100, 0.5
    with tempfile.TemporaryDirectory() as folder:
        data, config = f"{folder}/d", f"{folder}/penstock.toml"
        with open(config, "w", encoding="utf-8") as file:
            file.write("[mqtt.limits]\nmax_per_address = 100000\n")
        process, ready, empty = serve(data, config)
        empty_busy, empty_memory = processor_seconds(process.pid), resident_mib(process.pid)
        for number in range(options.channels):
            with IngestWriter(data, f"channel-{number}") as writer:
                writer.append(b"one")
        asyncio.run(connect_all(ready["listeners"]["mqtt"], options.sessions))
        stop(process)
        process, ready, full = serve(data, config)
        before, began = processor_seconds(process.pid), time.monotonic()
        time.sleep(options.idle)
        busy = (processor_seconds(process.pid) - before) / (time.monotonic() - began)
        memory = resident_mib(process.pid)
        stop(process)
    print("| node | start, s | start, processor s | idle, % of a core | resident, MiB |")
    print("|---|---|---|---|---|")
    print(f"| new | {empty:.1f} | {empty_busy:.1f} | | {empty_memory:.0f} |")
    what = f"{options.channels:,} channels, {options.sessions:,} sessions"
    print(f"| {what} | {full:.1f} | {before:.1f} | {100 * busy:.2f} | {memory:.0f} |")


if __name__ == "__main__":
    main()
