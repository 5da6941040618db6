"""What does one send cost, against the Go original in turns?

    python bench/single_sends.py [ORIGINAL] [--count 2000000] [--turns 5] [--quick] [--json]

ORIGINAL is a program around filechannel's ``Sender.Send``, started as ``ORIGINAL COUNT SIZE FOLDER``: it opens a
channel in FOLDER, sends 100,000 messages of SIZE bytes to warm up, then COUNT more one after another, and prints the
seconds that these took by the clock and of the processor.  Without it ours is measured alone.  Each turn is a process
of its own; the figure is the median over the turns.  The original loses what it has not flushed when its process is
killed; here a message that was sent is in the file.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from _table import machine, markdown
from penstock.log.filechannel import FileChannel

SIZES = (16, 64, 512)
WARM = 100_000


def ours(count: int, size: int, folder: str) -> None:
    """Send, and print seconds by the clock and of the processor."""
    with FileChannel.open(f"{folder}/queue") as queue:
        send, message = queue.tx().send, bytes(size)
        for _ in range(WARM):
            send(message)
        use = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        for _ in range(count):
            send(message)
        took, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        print(took, now.ru_utime + now.ru_stime - use.ru_utime - use.ru_stime)


def measure(command: list[str], count: int, size: int) -> tuple[float, float]:
    """Return the microseconds of one send, by the clock and of the processor."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, str(count), str(size), folder], check=True, capture_output=True, text=True)
    took, used = map(float, done.stdout.split())
    return took / count * 1e6, used / count * 1e6


def main() -> None:
    """Run the turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("original", metavar="ORIGINAL", nargs="?", help="a program that sends with the original")
    parser.add_argument("--count", type=int, default=2_000_000, help="sends a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.count, arguments.turns = 20_000, 1
    commands = {"Go": [arguments.original]} if arguments.original else {}
    commands["Penstock"] = [sys.executable, __file__, "--ours"]
    rows: list[dict[str, float]] = []
    for size in SIZES:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(arguments.turns):
            for name, command in commands.items():
                found[name].append(measure(command, arguments.count, size))
        rows.append({
            "bytes": size,
            **{f"{name}, µs": statistics.median(turn[0] for turn in turns) for name, turns in found.items()},
            **{f"{name}, µs of processor": statistics.median(t[1] for t in turns) for name, turns in found.items()},
        })  # fmt: skip
        if arguments.original:
            rows[-1]["times as long"] = rows[-1]["Penstock, µs"] / rows[-1]["Go, µs"]
    if arguments.json:
        print(json.dumps(rows))
        return
    cells = [[int(row["bytes"]), *(f"{cell:.2f}" for cell in list(row.values())[1:])] for row in rows]
    print(f"{machine()}\n\n{markdown(list(rows[0]), cells)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ours"]:
        ours(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
