"""A node under mixed load: memory and descriptors stay flat, kills, and the ledger is exact after each.

PENSTOCK_SOAK_SECONDS=1800 pytest tests/soak/test_node_soak.py --long -s
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from command import PENSTOCK, penstock
from node_use import PORTS, ask

from penstock.errors import PenstockError
from penstock.log import open_log
from penstock.mqtt import Client
from penstock.node import IngestWriter

LONG_SECONDS, LONG_KILLS = 1800.0, 10
SHORT_SECONDS, SHORT_KILLS = 4.0, 1
CONFIG = """
[ledger]
look_seconds = 1.0
[mqtt.broker]
max_queued_messages = 2000
[[mqtt.taps]]
filter = "plant/#"
path = "{folder}/d/logs/plant"
[[channel]]
name = "readings"
segment_bytes = 4000000
[[fold]]
name = "latest"
log = "{folder}/d/logs/plant"
store = "{folder}/d/latest.snap"
[[ship]]
log = "{folder}/d/logs/readings"
url = "file://{folder}/up"
"""


def start(folder: Path) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    command = [*PENSTOCK, "serve", "--data", f"{folder}/d", "--config", f"{folder}/penstock.toml", *PORTS, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def anonymous_kib(pid: int) -> int:
    """Return its own memory; pages of files it maps are the machine's cache, which takes what is free."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1])


def floor_of(pid: int, seconds: float) -> tuple[int, int]:
    """Wait this long; return the least memory and the fewest descriptors seen meanwhile.

    What is kept for good raises the floor; one moment says little, for a batch on its way is memory too.
    """
    ends, seen = time.monotonic() + seconds, []
    while not seen or time.monotonic() < ends:
        seen.append((anonymous_kib(pid), len(os.listdir(f"/proc/{pid}/fd"))))
        time.sleep(min(0.25, seconds / 4))
    print(f"memory {min(seen)[0]} to {max(seen)[0]} KiB in {len(seen)} samples")
    return min(memory for memory, _ in seen), min(files for _, files in seen)


@pytest.mark.timeout(7200)
def test_a_node_under_mixed_load_stays_flat_and_exact(tmp_path: Path, long_run: bool) -> None:
    seconds, kills = (LONG_SECONDS, LONG_KILLS) if long_run else (SHORT_SECONDS, SHORT_KILLS)
    seconds = float(os.environ.get("PENSTOCK_SOAK_SECONDS", seconds))
    (tmp_path / "penstock.toml").write_text(CONFIG.format(folder=tmp_path))
    stop, subscribed, address = threading.Event(), threading.Event(), {"mqtt": ""}
    ingested, published = [0, 0], [0]

    def ingest(number: int) -> None:
        with IngestWriter(tmp_path / "d", "readings", writer=f"w{number}", timeout=300) as writer:
            while not stop.is_set():
                writer.append_many([b"%d %d" % (number, ingested[number] + k) for k in range(50)])
                ingested[number] += 50

    async def publish() -> None:
        while not (subscribed.is_set() or stop.is_set()):  # both sessions are to get everything
            await asyncio.sleep(0.01)
        while not stop.is_set():
            try:
                async with Client(f"mqtt://{address['mqtt']}", reconnect=False) as client:
                    while not stop.is_set():
                        await client.publish(f"plant/{published[0] % 100}", b"%d" % published[0], qos=1)
                        published[0] += 1
            except (PenstockError, OSError):
                await asyncio.sleep(0.1)

    async def listen() -> None:
        """A session that outlives kills and acknowledges what comes; another never comes back, and its queue fills."""
        while not stop.is_set():
            try:
                target = f"mqtt://{address['mqtt']}"
                kept: Any = {"clean": False, "session_expiry": 10**6, "reconnect": False}  # its address changes
                async with Client(target, client_id="away", **kept) as client:
                    await client.subscribe("plant/#", qos=1)
                async with Client(target, client_id="keen", **kept) as client:
                    await client.subscribe("plant/#", qos=1)
                    subscribed.set()
                    while not stop.is_set():
                        async with asyncio.timeout(5):
                            async for _ in client.messages():
                                heard[0] += 1
                                if stop.is_set():
                                    break
            except (PenstockError, OSError, TimeoutError):
                await asyncio.sleep(0.1)

    heard, rounds = [0], []
    process, ready = start(tmp_path)
    address["mqtt"] = ready["listeners"]["mqtt"]
    threads = [threading.Thread(target=ingest, args=(number,)) for number in range(2)]
    threads.append(threading.Thread(target=lambda: asyncio.run(publish())))
    threads.append(threading.Thread(target=lambda: asyncio.run(listen())))
    for thread in threads:
        thread.start()
    grew = []
    try:
        for kill in range(kills):
            time.sleep(seconds / kills / 4)
            half = floor_of(process.pid, seconds / kills / 4)
            time.sleep(seconds / kills / 4)
            grew.append((half, floor_of(process.pid, seconds / kills / 4)))
            counted = ask(ready["listeners"]["http"], "/metrics")[1].decode()
            assert "penstock_ledger_ok" in counted
            assert not [
                line for line in counted.splitlines() if line.startswith("penstock_ledger_ok{") and line[-4:] != " 1.0"
            ]
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            done = penstock("ledger", tmp_path / "d", "--json")
            assert done.returncode == 0, done.stdout
            process, ready = start(tmp_path)
            address["mqtt"] = ready["listeners"]["mqtt"]
            rounds.append(published[0])
            print(f"kill {kill + 1}: heard {heard[0]}, ingested {sum(ingested)}, published {published[0]}, {grew[-1]}")
        stop.set()
        for thread in threads:
            thread.join(300)
        process.terminate()
        assert process.wait(120) == 0
    finally:
        stop.set()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        for thread in threads:
            thread.join(310)
    seams = {
        seam["seam"]: seam
        for seam in map(json.loads, penstock("ledger", tmp_path / "d", "--json").stdout.split("\n")[:-1])
    }
    print(json.dumps(seams, indent=1))
    assert all(seam["ok"] for seam in seams.values())
    assert seams["ingest:readings"]["came"] == sum(ingested)
    assert rounds == sorted(set(rounds)), "nothing was published between two kills"
    deliveries = seams["mqtt:deliveries"]
    assert deliveries["came"] >= 2 * published[0] > 0
    assert deliveries["went"] > 0
    assert deliveries["lost"].keys() <= {"queue full"}
    with open_log(str(tmp_path / "d/logs/plant")) as log:
        found = log.read(log.first_position, 1)
        assert len(found) == 1
    assert seams[f"tap:{tmp_path}/d/logs/plant"]["went"] >= published[0]
    for (memory, files), (later, more) in grew:
        assert later < memory * 1.25 + 20_000, grew
        assert more <= files + 20, grew
