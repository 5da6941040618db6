"""Promise: a driver that is killed loses nothing and repeats nothing, neither in a log nor in the lake."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.log.detect import open_log
from penstock.log.xchannel import Writer
from penstock.spark.lake.table import open_table
from penstock.spark.source.plan import find_channels
from penstock.testing.log_conformance import contents

DRIVER = Path(__file__).with_name("_spark_driver.py")
BATCH_RECORDS = 2_000
BURST = 50
PAUSE_SECONDS = 0.05


class LiveChannel(threading.Thread):
    """Goes on writing numbers, a burst every now and then, until it is told to stop."""

    def __init__(self, path: Path) -> None:
        super().__init__(name="live-channel")
        self.writer = Writer.open(path, region_bytes=1 << 16, roll_bytes=1 << 20)
        self.written = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(PAUSE_SECONDS):
            numbers = range(self.written, self.written + BURST)
            self.writer.append_many([b"%d" % n for n in numbers], kind=1, timestamp_ns=[n + 1 for n in numbers])
            self.written += BURST

    def stop(self) -> int:
        self.over.set()
        self.join()
        self.writer.close()
        return self.written


def start(folder: Path) -> subprocess.Popen[bytes]:
    (folder / "started").unlink(missing_ok=True)
    with open(folder / "driver.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, str(DRIVER), str(folder), str(BATCH_RECORDS)],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_for(path: Path, driver: subprocess.Popen[bytes], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if driver.poll() is not None or time.monotonic() > deadline:
            said = (path.parent / "driver.log").read_text()[-3000:]
            raise AssertionError(f"the driver ended or hangs before {path.name}:\n{said}")
        time.sleep(0.05)


def kill(driver: subprocess.Popen[bytes]) -> None:
    """Kill the driver and its JVM at once: nothing of them gets to run another line."""
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait(30)


def digest(payloads: list[bytes]) -> str:
    return hashlib.sha256(b"\n".join(payloads)).hexdigest()


def progress(folder: Path) -> tuple[int, int]:
    """Return how many commits the lake has, and how many batches the log."""
    table = open_table(str(folder / "lake"))
    log = folder / "checkpoints" / "log" / "commits"
    return -1 if table is None else table.version(), len(list(log.glob("[0-9]*"))) if log.exists() else 0


@pytest.mark.timeout(3600)
def test_a_killed_driver_loses_nothing_and_repeats_nothing(tmp_path: Path, long_run: bool) -> None:
    turns = 30 if long_run else 2
    chance = random.Random(7)
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    channel = LiveChannel(tmp_path / "in" / "ticks")
    channel.start()
    grew = 0
    try:
        for turn in range(turns):
            before = progress(tmp_path)
            driver = start(tmp_path)
            try:
                wait_for(tmp_path / "started", driver)
                if turn % 4 != 3:  # now and then it is killed before it has done anything
                    while progress(tmp_path) == before and driver.poll() is None:
                        time.sleep(0.02)
                time.sleep(chance.uniform(0.0, 2.0))
            finally:
                kill(driver)
            grew += progress(tmp_path) != before
    finally:
        written = channel.stop()
    (tmp_path / "all-written").touch()
    driver = start(tmp_path)
    try:
        wait_for(tmp_path / "finished", driver, 1800)  # all that was written while drivers started and died
    finally:
        kill(driver)
    print(f"{turns} kills, {grew} of them after a batch was done; {written} records")
    assert grew >= turns // 2
    expected = digest([b"%d" % n for n in range(written)])
    with open_log(str(tmp_path / "out" / "copy")) as log:
        found = contents(log)
    assert len(found) == written
    assert digest(found) == expected
    assert [item.name for item in find_channels([str(tmp_path / "out")])] == ["copy"]
    assert not [name for name in os.listdir(tmp_path / "out") if "staged" in name]
    table = open_table(str(tmp_path / "lake"))
    assert table is not None
    rows = pa.concat_tables([pq.read_table(uri.removeprefix("file://")) for uri in table.file_uris()])
    assert len(rows) == written
    assert digest(rows.sort_by("position").column("payload").to_pylist()) == expected
