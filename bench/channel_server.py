"""How fast is the channel server, against the original with the same load generator in the same run?

    python bench/channel_server.py [--quick] [--seconds S] [--original PATH/narwhal] [--authenticator PATH] [--json]
                                   [--keeping NAME] [--payload BYTES]

Each server runs in its own process, the generator (bench/_channel_load.py) in another; turns alternate.  Persistent
channels need authentication: the original asks its example modulator (``--authenticator``), or our modulator server
with the same rules, which it asks when a client logs in; ours asks a Python class.  The generator's own ceiling is
measured against a stub in another process that does TLS and nothing else.  Processor time is what a server used by
itself: other work on the machine hardly changes it.  A rate counts messages that reached every consumer: what a server
has acknowledged and still holds in memory is not carried.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _channel_load import processor_seconds
from _table import markdown

HERE = Path(__file__).parent
SUPPORT = str(HERE.parent / "tests" / "support")
PATHS = os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")]))  # the tree that is tested stays in it
PASSWORD = "s3cret"
LIMITS = """
[c2s-server.limits]
max_connections = 1000
max_message_size = 32768
max_payload_size = 131072
payload_pool_memory_budget = 1073741824
max_clients_per_channel = 1000
max_inflight_requests = 100
max_persist_messages = 1000000
outbound_message_queue_size = 262144
rate_limit = 0
"""
SHAPES = [(size, *sides) for sides in ((1, 1), (1, 10), (10, 10)) for size in (256, 1024, 16_384)]
KEEPING = {"transient": [], "flush 100 ms": ["--persist", "--flush-ms", "100"], "fsync each": ["--persist"]}

MODULATOR = """
import asyncio, sys
from wire_use import PlainAuthenticator
from penstock.channels.wire.remote import ModulatorServer
from penstock.channels.wire import WireSettings

async def main():
    settings = WireSettings(keep_alive_interval=30.0, max_payload_size=131072, max_message_size=32768)
    async with ModulatorServer(PlainAuthenticator(), socket_path=sys.argv[1], settings=settings):
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Ours:
    name = "penstock"

    def __init__(self, folder: str, *, auth: bool) -> None:
        config = Path(folder, "config.toml")
        config.write_text(LIMITS)
        modulator = ["--modulator", "wire_use:PlainAuthenticator"] if auth else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "channels", "serve", "--data", f"{folder}/data", "--port", "0",
             "--plain-port", "0", "--config", str(config), "--json", *modulator],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": PATHS},
        )  # fmt: skip
        assert self.process.stdout is not None
        listeners = json.loads(self.process.stdout.readline())["listeners"]
        self.tls, self.plain = listeners["channels"], listeners["channels-plain"]
        self.pid = self.process.pid

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Original:
    name = "narwhal 0.7.0"

    def __init__(self, folder: str, binary: str, authenticator: str | None, *, auth: bool) -> None:
        self.processes = []
        port = 22_690 + os.getpid() % 300
        extra = ""
        if auth:
            path = f"{folder}/s2m"
            Path(folder, "modulator.toml").write_text(
                f'[server]\n[server.listener]\nnetwork = "unix"\nsocket_path = "{path}"\n'
                "[server.limits]\nmax_payload_size = 131072\nmax_message_size = 32768\nrate_limit = 0\n"
            )
            asked = [authenticator, "-c", f"{folder}/modulator.toml"]
            self.processes.append(subprocess.Popen(
                [sys.executable, "-c", MODULATOR, path] if authenticator is None else asked, cwd=folder,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": PATHS},
            ))  # fmt: skip
            while not os.path.exists(path):
                time.sleep(0.05)
            extra = f'[modulator]\ntype = "s2m"\n[modulator.s2m-client]\nnetwork = "unix"\nsocket_path = "{path}"\n'
        config = Path(folder, "config.toml")
        config.write_text(
            f"[telemetry.metrics]\nenabled = false\n[c2s-server.listener]\nbind_address = '127.0.0.1'\nport = {port}\n"
            f"[c2s-server.storage]\ndata_dir = '{folder}/data'\n{LIMITS}\n{extra}"
        )
        self.processes.append(subprocess.Popen(
            [binary, "-c", str(config)], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ))  # fmt: skip
        self.tls, self.plain = f"127.0.0.1:{port}", None
        self.pid = self.processes[-1].pid
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > until or self.processes[-1].poll() is not None:
                    raise SystemExit(f"{binary} does not listen") from None
                time.sleep(0.02)

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait(30)


def load(*args: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / "_channel_load.py"), "--json", *args], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"per_second": 0, "reached_per_second": 0, "p50_ms": None, "p99_ms": None, "error": done.stderr[-200:]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def one(server: Any, shape: tuple[int, int, int], keeping: str, seconds: float, *, tls: bool) -> dict[str, Any]:
    payload, producers, consumers = shape
    args = ["--payload", str(payload), "--producers", str(producers), "--consumers", str(consumers)]
    args += ["--seconds", str(seconds), *KEEPING[keeping]]
    args += ["--server", server.tls, "--tls"] if tls else ["--server", server.plain]
    args += ["--password", PASSWORD] if keeping != "transient" else []
    before = processor_seconds(server.pid)
    found = load(*args)
    used = processor_seconds(server.pid) - before
    return {**found, "cpu_us": round(used * 1e6 / found["acked"], 1) if found.get("acked") else None}


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Print each case with both servers beside each other, then ours without TLS, then what the generator can do."""

    def said(row: dict[str, Any] | None) -> str:
        return "" if row is None else f"{row['reached_per_second']:,}/s, {row['p50_ms']} / {row['p99_ms']} ms"

    def ratio(above: float | None, below: float | None) -> str:
        return f"{above / below:.1f}" if above and below else ""

    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(row["what"], {})[row["server"]] = row
    together, plain = [], []
    for what, servers in cases.items():
        ours, theirs = servers.get("penstock"), servers.get("narwhal 0.7.0")
        if ours is None:
            continue
        cells = [said(ours), f"{ours['cpu_us']}"]
        if ", plain, " in what:
            plain.append([what.replace(", plain", ""), *cells])
            continue
        if theirs is not None:
            rates = ratio(ours["reached_per_second"], theirs["reached_per_second"])
            cells = [
                said(ours),
                said(theirs),
                rates,
                cells[1],
                theirs["cpu_us"],
                ratio(theirs["cpu_us"], ours["cpu_us"]),
            ]
        together.append([what.replace(", TLS", ""), *cells])
    each = "processor µs, "
    peer = ["penstock", "narwhal 0.7.0", "times its rate", f"{each}penstock", f"{each}narwhal", "times less"]
    if together:
        head = peer if len(together[0]) == 7 else ["penstock", f"{each}penstock"]
        print(markdown(["TLS", *head], together), "\n")
    if plain:
        print(markdown(["plain", "penstock", f"{each}penstock"], plain), "\n")
    stubs = [row for row in rows if row["server"] == "stub"]
    reached = [
        [row["what"].removesuffix(", what the generator can do"), f"{row['reached_per_second']:,}/s"] for row in stubs
    ]
    print(markdown(["the generator against a stub", "messages that reached all"], reached))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short turn of the smallest case")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--original", help="the binary of the original server")
    parser.add_argument("--authenticator", help="the binary of its example plain-authenticator")
    parser.add_argument("--keeping", choices=list(KEEPING), help="only this way of keeping")
    parser.add_argument("--payload", type=int, help="only this size")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shapes = SHAPES[:1] if args.quick else [shape for shape in SHAPES if args.payload in (None, shape[0])]
    ways = [args.keeping] if args.keeping else ["transient"] if args.quick else list(KEEPING)
    turns, seconds = (1, 0.5) if args.quick else (args.turns, args.seconds)
    rows: list[dict[str, Any]] = []
    for payload in sorted({shape[0] for shape in shapes}):
        for way, words in (("TLS", ["--tls"]), ("plain", [])):
            ceiling = load("--stub", "--seconds", str(seconds), "--payload", str(payload), *words)
            rows.append({"what": f"{payload} B, 1→1, {way}, what the generator can do", "server": "stub", **ceiling})
    for keeping in ways:
        for tls in (True, False):
            for shape in shapes:
                found: dict[str, list[dict[str, Any]]] = {}
                for _ in range(turns if tls else 1):  # without TLS there is nobody to compare with
                    for kind in ("penstock", "original"):
                        if kind == "original" and (args.original is None or not tls):
                            continue
                        with tempfile.TemporaryDirectory() as folder:
                            auth = keeping != "transient"
                            server: Any = (
                                Ours(folder, auth=auth)
                                if kind == "penstock"
                                else Original(folder, args.original, args.authenticator, auth=auth)
                            )
                            try:
                                found.setdefault(server.name, []).append(one(server, shape, keeping, seconds, tls=tls))
                            finally:
                                server.stop()
                what = f"{shape[0]} B, {shape[1]}→{shape[2]}, {'TLS' if tls else 'plain'}, {keeping}"
                for name, results in found.items():
                    middle = statistics.median_low(result["reached_per_second"] for result in results)
                    row = next(result for result in results if result["reached_per_second"] == middle)
                    rows.append({"what": what, "server": name, **row})
                    if not args.json:
                        rate, times = (
                            f"{row['reached_per_second']:>9,}/s",
                            f"p50 {row['p50_ms']}  p99 {row['p99_ms']}  {row['cpu_us']} µs",
                        )
                        print(f"{what:45} {name:14} {rate}  {times}", row.get("error", ""), flush=True)
    if args.json:
        print(json.dumps(rows))
        return
    print_tables(rows)


if __name__ == "__main__":
    main()
