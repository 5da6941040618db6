"""Promise: a machine whose calendar is before 1970 is refused by name, and no number or record is spent on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")

SOURCE = Path(__file__).parents[1] / "support" / "calendar.c"

WRITES = """
import asyncio, json, sys
from penstock.channels import ChannelManager
from penstock.errors import OptionsError
from penstock.kv import EmbeddedConnection, StoreConfig
from penstock.log.detect import open_log, open_writer

root, said = sys.argv[1], {}

def note(name, call):
    try:
        call()
        said[name] = "written"
    except OptionsError as exc:
        said[name] = str(exc)

for name in ("xchannel", "messagelog", "filechannel"):
    with open_writer(f"{root}/{name}", format=name) as writer:
        note(name, lambda: writer.append(b"one"))
        note(name + " many", lambda: writer.append_many([b"one", b"two"]))
    with open_log(f"{root}/{name}") as log:
        said[name + " next"] = log.next_position

async def put():
    connection = EmbeddedConnection(root + "/buckets")
    await connection.connect()
    try:
        bucket = await connection.store_with_config(StoreConfig(name="state"))
        await bucket.writer.put("key", b"value")
    finally:
        await connection.shutdown()

async def broadcast():
    async with await ChannelManager.open(root + "/channels") as manager:
        room = manager.channel("room")
        await room.join("ann@localhost")
        await room.configure("ann@localhost", persist=True, max_persist_messages=5)
        await room.broadcast("ann@localhost", b"hello")

note("bucket", lambda: asyncio.run(put()))
note("channel", lambda: asyncio.run(broadcast()))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    target = tmp_path_factory.mktemp("calendar") / "calendar.so"
    made = subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(target), str(SOURCE), "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no compiler: {made.stderr}")
    return str(target)


def test_a_calendar_before_1970_is_refused_by_name(library: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WRITES, str(tmp_path)],
        env={**os.environ, "LD_PRELOAD": library, "CALENDAR_SECONDS": "-1000000000"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    for name in ("xchannel", "xchannel many", "messagelog", "messagelog many", "bucket", "channel"):
        assert " says -" in said[name], name
        assert "1970" in said[name], name
    assert said["filechannel"] == said["filechannel many"] == "written"  # it keeps no times
    assert (said["xchannel next"], said["messagelog next"]) == (80, 1)  # no record, and no number spent
