"""Promise: what ingest acknowledged is in the log once, through kill -9 of the node, and the ledger is exact."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from pathlib import Path

import pytest
from command import PENSTOCK, penstock

from penstock.log import open_log
from penstock.node import IngestWriter

POINTS = ("ingest.announced", "ingest.appended")


def start(data: Path, config: Path, point: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [
        *PENSTOCK, "serve", "--data", str(data), "--config", str(config), "--port", "0", "--channels-port", "0",
        "--http-port", "0", "--json",
    ]  # fmt: skip
    more = {"PENSTOCK_FAIL_POINT": point} if point else {}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**environment, **more}
    )
    assert process.stdout is not None
    if not point:
        assert process.stdout.readline(), "the node did not start"
    return process


def test_ingest_survives_kill_9_of_the_node_and_the_ledger_is_exact(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    import os

    rounds = 40 if request.config.getoption("--long", default=False) else 5
    rng = random.Random(19)
    data, config = tmp_path / "d", tmp_path / "penstock.toml"
    log = data / "logs" / "readings"
    config.write_text(
        "[mqtt]\nenabled = false\n[channels]\nenabled = false\n[ledger]\nlook_seconds = 0.2\n"
        f'[[channel]]\nname = "readings"\nsegment_bytes = 100000\n'
        f'[[ship]]\nlog = "{log}"\nurl = "file://{tmp_path}/up"\n'
    )
    stop = threading.Event()
    acked = [0, 0, 0]

    def produce(number: int) -> None:
        with IngestWriter(data, "readings", writer=f"w{number}", timeout=120) as writer:
            sent = 0
            while not stop.is_set():
                count = 1 + sent % 17
                writer.append_many([b"%d %d" % (number, sent + k) for k in range(count)])
                sent += count
                acked[number] = sent

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    process = None
    try:
        for number in range(rounds):
            point = f"{POINTS[number % 2]}:{rng.randrange(20, 120)}" if number % 3 else ""
            process = start(data, config, point, dict(os.environ))
            if not point:
                time.sleep(0.3 + rng.random() / 2)
                process.kill()
            process.wait(120)
            assert process.stdout is not None
            process.stdout.close()
            ledger = [json.loads(line) for line in penstock("ledger", data, "--json").stdout.splitlines()]
            assert [seam["seam"] for seam in ledger if not seam["ok"]] == [], ledger
        process = start(data, config, "", dict(os.environ))
        deadline = time.monotonic() + 120
        while min(acked) <= rounds and time.monotonic() < deadline:
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join(120)
        process.terminate()
        assert process.wait(120) == 0
    finally:
        stop.set()
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for thread in threads:
            thread.join(130)
    with open_log(str(log)) as reader:
        found: list[bytes] = []
        at = reader.first_position
        while len(batch := reader.read(at)):
            found += batch.to_payloads()
            at = batch.next_position
    for number in range(3):
        mine = [int(one.split()[1]) for one in found if one.startswith(b"%d " % number)]
        assert mine == list(range(acked[number])), f"writer {number}"
        assert acked[number] > rounds
    done = penstock("ledger", data, "--json")
    seams = {seam["seam"]: seam for seam in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0
    assert seams["ingest:readings"]["came"] == seams["ingest:readings"]["went"] == sum(acked)
    shipped = seams["ship:readings"]
    assert shipped["came"] == sum(acked) == shipped["went"] + shipped["waiting"]
