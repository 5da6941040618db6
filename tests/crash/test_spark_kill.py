"""Promise: a driver that is killed loses nothing and repeats nothing, neither in a log nor in the lake."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.log.detect import open_log
from penstock.log.xchannel import Writer
from penstock.spark.lake import open_table
from penstock.testing.log_conformance import contents

DRIVER = Path(__file__).with_name("_spark_driver.py")
RECORDS = 8_000


def start(folder: Path) -> subprocess.Popen[bytes]:
    for name in ("started", "finished"):
        (folder / name).unlink(missing_ok=True)
    with open(folder / "driver.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, str(DRIVER), str(folder), str(RECORDS)], stdout=log, stderr=log, start_new_session=True
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


@pytest.mark.timeout(3600)
def test_a_killed_driver_loses_nothing_and_repeats_nothing(
    tmp_path: Path, request: pytest.FixtureRequest, record_property: pytest.RecordProperty
) -> None:
    turns = 30 if request.config.getoption("--long", default=False) else 2
    chance = random.Random(7)
    source = tmp_path / "in"
    source.mkdir()
    with Writer.open(source / "ticks", region_bytes=1 << 16, roll_bytes=1 << 20) as writer:
        written = 0

        def more() -> None:
            nonlocal written
            numbers = range(written, written + RECORDS)
            writer.append_many([b"%d" % n for n in numbers], kind=1, timestamp_ns=[n + 1 for n in numbers])
            written += RECORDS

        more()
        killed_inside = 0
        for turn in range(turns):
            driver = start(tmp_path)
            try:
                wait_for(tmp_path / "started", driver)
                time.sleep(chance.uniform(0.2, 3.0))
            finally:
                kill(driver)
            killed_inside += not (tmp_path / "finished").exists()
            if turn % 5 == 4:
                more()
        driver = start(tmp_path)
        try:
            wait_for(tmp_path / "finished", driver)
        finally:
            kill(driver)
    record_property("killed_while_working", killed_inside)
    assert killed_inside >= turns // 2
    with open_log(str(tmp_path / "out")) as log:
        assert contents(log) == [b"%d" % n for n in range(written)]
    table = open_table(str(tmp_path / "lake"))
    assert table is not None
    rows = pa.concat_tables([pq.read_table(uri.removeprefix("file://")) for uri in table.file_uris()])
    assert sorted(int(payload) for payload in rows.column("payload").to_pylist()) == list(range(written))
