"""Promise: on a real disk of a few megabytes a broker fills up, refuses, is emptied by its subscriber and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import PENSTOCK

from penstock.errors import Refused
from penstock.mqtt.client import Client, ClientOptions
from penstock.mqtt.packets import Filter
from penstock.net.dial import Target

ON_SMALL_DISK = 'mount -t tmpfs -o size=8m none "$0" && exec "$@"'
CONFIG = "[persistence]\nsegment_bytes = 1048576\nreserve_bytes = 1048576\n"
PAYLOAD = bytes(8000)


def on_small_disk(folder: Path, *command: str) -> list[str]:
    return ["unshare", "-rm", "sh", "-c", ON_SMALL_DISK, str(folder), *command]


@contextlib.contextmanager
def broker_on_small_disk(tmp_path: Path) -> Iterator[int]:
    """Serve from a tmpfs that only the broker sees; yield its port."""
    folder, config = tmp_path / "small", tmp_path / "broker.toml"
    folder.mkdir()
    config.write_text(CONFIG)
    if shutil.which("unshare") is None or subprocess.run(on_small_disk(folder, "true"), check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    words = ["mqtt", "serve", "--data", str(folder / "data"), "--port", "0", "--config", str(config), "--json"]
    process = subprocess.Popen(on_small_disk(folder, *PENSTOCK, *words), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(json.loads(process.stdout.readline())["listeners"]["mqtt"].rpartition(":")[2])
        assert process.poll() is None, "it went on without a restart"
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def client(port: int, name: str) -> Client:
    options = ClientOptions(client_id=name, version=5, clean=False, session_expiry=10_000)
    return Client(Target(host="127.0.0.1", port=port), options)


async def fill_and_empty(port: int) -> None:
    async with client(port, "away") as sub:
        await sub.subscribe(Filter("plant/#", 1))
    acked = 0
    async with client(port, "pub") as pub:
        try:
            while acked < 10_000:
                await pub.publish("plant/7", b"%06d" % acked + PAYLOAD, qos=1)
                acked += 1
        except Refused as exc:
            assert "QUOTA" in str(exc)
        assert 500 < acked < 10_000
        got: list[int] = []
        async with client(port, "away") as sub, asyncio.timeout(60):
            async for message in sub.messages():
                got.append(int(message.payload[:6]))
                if len(got) == acked:
                    break
        assert got == list(range(acked))
        async with asyncio.timeout(120):
            while True:
                try:
                    await pub.publish("plant/7", b"%06d" % acked + PAYLOAD, qos=1)
                    break
                except Refused:
                    await asyncio.sleep(0.2)  # nothing but another try tells a publisher
    async with client(port, "away") as sub, asyncio.timeout(60):
        async for message in sub.messages():
            assert int(message.payload[:6]) == acked
            break


def test_a_broker_that_has_filled_a_real_disk_is_emptied_and_goes_on(tmp_path: Path) -> None:
    with broker_on_small_disk(tmp_path) as port:
        asyncio.run(fill_and_empty(port))
