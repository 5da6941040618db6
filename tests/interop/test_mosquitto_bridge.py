"""Our bridge to a real mosquitto, both ways and versions, with either side away in turn; `make interop` runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from command import PENSTOCK

from penstock.mqtt import Client, ClientOptions


class Mosquitto:
    """mosquitto that keeps its sessions when it is stopped, and comes again under its address."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = int(found.getsockname()[1])
        self.config = folder / "mosquitto.conf"
        os.chmod(folder, 0o777)
        self.config.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\npersistence true\npersistence_location {folder}/\n"
            "max_queued_messages 0\nuser root\n"
        )
        self.process: subprocess.Popen[bytes]

    async def start(self) -> None:
        self.process = subprocess.Popen(["mosquitto", "-c", str(self.config)], stderr=subprocess.DEVNULL)
        async with asyncio.timeout(30):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    return
                except OSError:
                    await asyncio.sleep(0.05)

    async def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self.process.wait, 30)


class Edge:
    """Our broker with the bridge, as a process that is killed."""

    def __init__(self, folder: Path, hub: int, version: str) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = int(found.getsockname()[1])
        self.folder, self.config = folder, folder / "edge.toml"
        self.config.write_text(
            f'[[bridges]]\nname = "hub"\nremote = {{url = "mqtt://127.0.0.1:{hub}", version = "{version}", '
            'reconnect_seconds = [0.05, 0.5]}\nsend = [{filter = "plant/#"}, {filter = "both/#"}]\n'
            'receive = [{filter = "commands/#", local_prefix = "hub/"}, {filter = "both/#"}]\n'
        )
        self.process: subprocess.Popen[bytes]

    async def start(self) -> None:
        words = ["--config", str(self.config), "--data", str(self.folder / "edge"), "--port", str(self.port), "--json"]
        self.process = subprocess.Popen(
            [*PENSTOCK, "mqtt", "serve", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        assert await asyncio.to_thread(self.process.stdout.readline)
        self.process.stdout.close()

    def kill(self) -> None:
        if hasattr(self, "process"):
            self.process.kill()
            self.process.wait()


def persistent(name: str, port: int) -> Client:
    options = ClientOptions(client_id=name, clean=False, session_expiry=3600, reconnect_seconds=(0.05, 0.5))
    return Client(f"127.0.0.1:{port}", options)


class Listener:
    """Takes what comes all the time, so that it is acknowledged."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.found: set[bytes] = set()
        self.fresh: list[bytes] = []
        """Those that were not marked as sent again."""
        self.task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for message in self.client.messages():
            self.found.add(message.payload)
            if not message.dup:
                self.fresh.append(message.payload)

    async def until(self, wanted: set[bytes]) -> None:
        async with asyncio.timeout(90):
            while not wanted <= self.found:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("version", ["5", "3.1.1"])
async def test_nothing_is_lost_either_way_while_either_side_is_away(tmp_path: Path, version: str) -> None:
    hub = Mosquitto(tmp_path)
    edge = Edge(tmp_path, hub.port, version)
    await hub.start()
    try:
        await edge.start()
        await both_ways(hub, edge)
    finally:
        edge.kill()
        await hub.stop()


async def both_ways(hub: Mosquitto, edge: Edge) -> None:
    there, here = persistent("there", hub.port), persistent("here", edge.port)
    await there.start()
    await here.start()
    await there.subscribe("plant/#", "both/#", qos=1)
    await here.subscribe("hub/#", "both/#", qos=1)
    heard_there, heard_here = Listener(there), Listener(here)
    up, down = set[bytes](), set[bytes]()
    number = 0
    for round_ in range(4):
        if round_ == 1:
            edge.kill()
        elif round_ == 2:
            await hub.stop()
        for _ in range(50):
            number += 1
            if round_ != 1:  # while our broker is away nobody publishes there
                await here.publish("plant/1", b"u%d" % number, qos=1)
                await here.publish("both/1", b"bu%d" % number, qos=1)
                up |= {b"u%d" % number, b"bu%d" % number}
            if round_ != 2:
                await there.publish("commands/1", b"d%d" % number, qos=1)
                await there.publish("both/1", b"bd%d" % number, qos=1)
                down |= {b"d%d" % number, b"bd%d" % number}
        if round_ == 1:
            await edge.start()
        elif round_ == 2:
            await hub.start()
    both_up = {payload for payload in up if payload.startswith(b"b")}
    both_down = {payload for payload in down if payload.startswith(b"b")}
    await heard_there.until(up | both_down)
    await heard_here.until(down | both_up)
    # Loops are cut: what each side sent under a topic of both directions came back to it once, by its own broker.
    for heard, own in ((heard_there, both_down), (heard_here, both_up)):
        assert [payload for payload in heard.fresh if payload in own] == sorted(own, key=lambda each: int(each[2:]))
    for heard in (heard_there, heard_here):
        heard.task.cancel()
        await heard.client.stop()
