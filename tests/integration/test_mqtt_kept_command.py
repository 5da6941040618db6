"""Promise: the command keeps state in --data, says what it restored, and makes and takes backups while it serves."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

from command import PENSTOCK
from mqtt_server import serve

from penstock.mqtt.client import Client, ClientOptions
from penstock.mqtt.packets import Filter
from penstock.net.dial import Target


def client(port: int, name: str) -> Client:
    options = ClientOptions(client_id=name, version=5, clean=False, session_expiry=10_000)
    return Client(Target(host="127.0.0.1", port=port), options)


async def leave_messages(port: int) -> None:
    async with client(port, "away") as sub:
        await sub.subscribe(Filter("plant/#", 2))
    async with client(port, "pub") as pub:
        await pub.publish_many("plant/7", [b"%d" % number for number in range(500)], qos=2)
        await pub.publish("plant/state", b"on", qos=1, retain=True)


async def collect(port: int, count: int) -> list[bytes]:
    found: list[bytes] = []
    async with client(port, "away") as sub, asyncio.timeout(30):
        async for message in sub.messages():
            found.append(message.payload)
            if len(found) == count:
                break
    return found


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PENSTOCK, "mqtt", *map(str, words)], capture_output=True, text=True, check=False)


def test_state_is_kept_backed_up_and_put_back(tmp_path: Path) -> None:
    data = tmp_path / "data"
    copy, other = tmp_path / "backups/monday", tmp_path / "restored/broker"  # folders above them are made
    with serve("--data", data, "--sync", "always") as broker:
        asyncio.run(leave_messages(broker.port()))
        made = run("backup", copy, "--data", data, "--json")
        assert made.returncode == 0, made.stderr
        facts = json.loads(made.stdout)
        assert (facts["sessions"], facts["subscriptions"], facts["retained"], facts["queued"]) == (2, 1, 1, 501)
        broker.process.kill()
        broker.process.wait(30)
    dumped = subprocess.run(
        [*PENSTOCK, "fold", "dump", str(data), "--json"], capture_output=True, text=True, check=True
    )
    keys = [json.loads(line)["key"] for line in dumped.stdout.splitlines()]
    assert {"retained/plant/state", "sessions/away", "subscriptions/away/plant/#"} <= set(keys)
    assert any(key.startswith("pending/away/") for key in keys)
    again = run("restore", copy, "--data", other, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == facts
    refused = run("restore", copy, "--data", other)
    assert refused.returncode != 0
    assert "already" in refused.stderr
    expected = [*(b"%d" % number for number in range(500)), b"on"]
    for folder in (data, other):
        with serve("--data", folder) as broker:
            assert asyncio.run(collect(broker.port(), 501)) == expected
            assert broker.stop() == 0
            assert broker.process.stderr is not None
            assert "501 queued" in broker.process.stderr.read()


def test_the_seeds_environment_counts_and_what_is_not_kept_is_said(tmp_path: Path) -> None:
    config = tmp_path / "broker.toml"
    config.write_text('[persistence]\nenabled = false\npath = "nowhere"\nsync_interval_secs = 5\n')
    os.environ["MQLITE__PERSISTENCE__PATH"] = str(tmp_path / "data")
    try:
        with serve("--config", config) as broker:
            assert broker.stop() == 0
            assert broker.process.stderr is not None
            assert "state is in memory" in broker.process.stderr.read()
        assert not (tmp_path / "data" / "journal").exists()
        os.environ["MQLITE__PERSISTENCE__ENABLED"] = "true"
        with serve("--config", config) as broker:
            assert broker.stop() == 0
        assert (tmp_path / "data" / "journal").exists()
    finally:
        for name in ("ENABLED", "PATH"):
            os.environ.pop(f"MQLITE__PERSISTENCE__{name}", None)
