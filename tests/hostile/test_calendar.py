"""Promise: a calendar before 1970 is refused by name where a record needs its time, and no number is spent on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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

PUBLISHES = """
import asyncio, json, sys
from penstock.errors import Refused
from penstock.mqtt import Client, Outbox
from penstock.node.config import load_config
from penstock.node.node import Node

root, said = sys.argv[1], {}

async def publish():
    tap = {"filter": "tapped", "path": root + "/tapped"}
    given = {"data": root + "/d", "mqtt.port": 0, "channels.enabled": False, "http.enabled": False, "mqtt.taps": [tap]}
    node = Node(load_config(None, given))
    await node.start()
    place = "127.0.0.1:" + node.describe()["parts"]["mqtt"]["listeners"]["mqtt"].rpartition(":")[2]
    for topic in ("plain", "tapped"):
        for qos in (0, 1, 2):
            for retain in (False, True):
                async with asyncio.timeout(60), Client(place) as client:
                    try:
                        await client.publish(topic, b"x", qos=qos, retain=retain)
                        said[f"{topic} {qos} {retain}"] = "published"
                    except Refused as exc:
                        said[f"{topic} {qos} {retain}"] = "refused"
    outbox = Outbox(root + "/outbox", "mqtt://" + place)
    await asyncio.to_thread(outbox.publish, "plain", b"x")
    said["outbox"] = await asyncio.to_thread(outbox.flush, 60)
    await asyncio.to_thread(outbox.close)
    said["taps"] = node.describe()["parts"]["mqtt"]["attached"]
    await node.stop()
    said["failures"] = node.failures

asyncio.run(publish())
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


def run_before_1970(library: str, program: str, folder: Path) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env={**os.environ, "LD_PRELOAD": library, "CALENDAR_SECONDS": "-1000000000"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said: dict[str, Any] = json.loads(run.stdout)
    return said


def test_a_calendar_before_1970_is_refused_by_name(library: str, tmp_path: Path) -> None:
    said = run_before_1970(library, WRITES, tmp_path)
    for name in ("xchannel", "xchannel many", "messagelog", "messagelog many", "bucket", "channel"):
        assert " says -" in said[name], name
        assert "1970" in said[name], name
    assert said["filechannel"] == said["filechannel many"] == "written"  # it keeps no times
    assert (said["xchannel next"], said["messagelog next"]) == (80, 1)  # no record, and no number spent


def test_a_broker_answers_before_1970_and_what_a_log_would_refuse_is_refused(library: str, tmp_path: Path) -> None:
    said = run_before_1970(library, PUBLISHES, tmp_path)
    for name in ("plain 0", "plain 1", "plain 2", "tapped 0"):
        assert said[f"{name} False"] == said[f"{name} True"] == "published", name
    for name in ("tapped 1", "tapped 2"):
        assert said[f"{name} False"] == said[f"{name} True"] == "refused", name
    assert said["outbox"] is True
    assert "no record has a time before that" in str(said["taps"])  # the two of QoS 0, counted under their reason
    assert said["failures"] == {}
