"""A shipper killed with -9 between any two steps, on a real S3 server: nothing is lost, repeated or deleted early.

The long form goes through every fail point of every format, again and again.  Each round reads what came in the last
ten, every tenth and the end all of it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from ship_use import FORMATS, Since, fill, open_writer, read_all

from penstock.disk import ObjectOptions, object_store_for
from penstock.ship.remote import ShippedLog
from penstock.ship.tiered import TieredLog
from penstock.testing.s3 import S3Server

WORKER = Path(__file__).parents[2] / "support" / "ship_worker.py"
POINTS = [
    "ship.put.after", "ship.swap.before", "ship.swap.after", "ship.cursor.before", "ship.page.after",
    "ship.drop.before", "ship.fence.before", "ship.fence.after", "ship.put.before", "ship.cursor.after",
]  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_no_kill_of_a_shipper_loses_repeats_or_deletes_early(
    format: str, s3: S3Server, tmp_path: Path, long_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(WORKER), str(tmp_path / "log"), url]
    rounds = 100 if long_run else 3
    start = FORMATS.index(format) * 3
    points = itertools.cycle(POINTS[start:] + POINTS[:start])
    wanted: list[bytes] = []
    since = Since()
    killed = 0
    with open_writer(format, tmp_path / "log") as writer:
        for number in range(rounds):
            for _ in range(4):
                wanted += fill(format, writer, len(wanted), 20)
            point = f"{next(points)}:{1 + number % 2}"
            done = subprocess.run(
                command,
                env={**environment, "PENSTOCK_FAIL_POINT": point},
                timeout=240,
                check=False,
                capture_output=True,
            )
            assert done.returncode in (0, -signal.SIGKILL), done.stderr
            killed += done.returncode != 0
            if read_head_exists(url, s3):
                with TieredLog(tmp_path / "log", f"{url}/log") as log:
                    assert since.read(log, number) == wanted, point
        subprocess.run(command, env=environment, timeout=240, check=True, capture_output=True)
    assert killed
    with ShippedLog(f"{url}/log", object_store_for(url, ObjectOptions(config=s3.options()))) as log:
        assert read_all(log) == wanted
        assert list(log.verify()) == []
        assert log.head.records == len(wanted)


def read_head_exists(url: str, s3: S3Server) -> bool:
    return object_store_for(url, ObjectOptions(config=s3.options())).head("log.shipped.json") is not None


async def test_a_network_that_is_away_degrades_a_shipper_and_loses_nothing(s3: S3Server, tmp_path: Path) -> None:
    from penstock.lifecycle import State
    from penstock.ship import ShipPart
    from penstock.testing.proxy import TcpProxy

    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    with TcpProxy(s3.port) as proxy, open_writer("messagelog", tmp_path / "log") as writer:
        objects = ObjectOptions(config=s3.options(proxy.port), retry_seconds=0.2, connect_seconds=1, timeout_seconds=5)
        wanted = fill("messagelog", writer, 0, 30)
        proxy.cut()
        part = ShipPart(tmp_path / "log", url, node="edge", objects=objects, look_seconds=0.05)
        await part.start()
        try:
            async with asyncio.timeout(120):
                while part.health().state is not State.DEGRADED:
                    await asyncio.sleep(0.02)
                proxy.heal()
                await part.ready()
                while part.describe().get("shipped_to") != 31:
                    await asyncio.sleep(0.02)
                assert part.health().state is State.READY
                proxy.stall()
                wanted += fill("messagelog", writer, 30, 30)
                while part.health().state is not State.DEGRADED:
                    await asyncio.sleep(0.02)
                proxy.heal(old="dead")
                while part.describe()["shipped_to"] != 61:
                    await asyncio.sleep(0.02)
                await part.drain(60)
        finally:
            await part.stop()
        assert part.health().state is State.STOPPED
    with ShippedLog(f"{url}/log", object_store_for(url, ObjectOptions(config=s3.options()))) as log:
        assert read_all(log) == wanted


async def test_a_shipper_that_is_taken_over_fails_and_says_so(s3: S3Server, tmp_path: Path) -> None:
    from penstock.errors import LockedError
    from penstock.ship import ShipPart

    store = object_store_for(f"s3://{s3.bucket}/{uuid.uuid4().hex}", ObjectOptions(config=s3.options()))
    with open_writer("messagelog", tmp_path / "log") as writer:
        first = ShipPart(tmp_path / "log", store, look_seconds=0.05)
        await first.start()
        await first.ready()
        second = ShipPart(tmp_path / "log", store, look_seconds=0.05)
        await second.start()
        await second.ready()
        fill("messagelog", writer, 0, 5)
        with pytest.raises(LockedError):
            await first.wait()
        async with asyncio.timeout(60):
            while second.describe()["shipped_to"] != 6:
                await asyncio.sleep(0.02)
        for part in (first, second):
            await part.stop()
