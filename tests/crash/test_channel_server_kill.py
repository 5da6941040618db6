"""Promise: whenever the server is killed, nothing it acknowledged is lost, no number is used twice, and clients that
resume hear every message once.

Short form: a few rounds and few channels.  Long form (``--long``): 200 rounds, 1,000 channels, 100,000 members.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from penstock.channels import Client, FileChannelStore, PersistedChannel
from penstock.channels.ids import Nid
from penstock.channels.model import StoredConfig
from penstock.channels.wire import Gap, Heard
from penstock.errors import PenstockError, Refused
from penstock.log.messagelog import MessageLogReader

SUPPORT = str(Path(__file__).parents[1] / "support")
PATHS = os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")]))  # the tree that is tested stays in it
LONG_ROUNDS = int(os.environ.get("PENSTOCK_KILL_ROUNDS", "200"))
ANN, BOB = "AGFubgBzM2NyZXQ=", "AGJvYgBzM2NyZXQ="


def start(folder: Path, port: int) -> tuple[subprocess.Popen[bytes], int]:
    (folder.parent / "config.toml").write_text(
        "[c2s-server.limits]\nrate_limit = 0\nmax_channels = 100000\nmax_channels_per_client = 100000\n"
        "max_clients_per_channel = 100000\nmax_persist_messages = 10000000\noutbound_message_queue_size = 1000000\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "channels", "serve", "--data", str(folder), "--port", "-1",
         "--plain-port", str(port), "--json", "--modulator", "wire_use:PlainAuthenticator",
         "--config", str(folder.parent / "config.toml")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": PATHS},
    )  # fmt: skip
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    process.stdout.close()
    return process, int(ready["listeners"]["channels-plain"].rpartition(":")[2])


class Load:
    """Two members that use one server as hard as they can, and remember what was acknowledged."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.acked: dict[int, bytes] = {}
        self.pushed: list[bytes] = []
        self.maybe_pushed: set[bytes] = set()
        self.popped: list[bytes] = []
        self.joined: set[str] = set()
        self.heard: list[int] = []
        self.gaps: list[Gap] = []
        self.twice: list[int] = []
        self.count = 0

    async def open(self) -> None:
        self.ann = await Client.connect(self.address, token=ANN, timeout=60)
        self.bob = await Client.connect(self.address, token=BOB, timeout=60)
        for channel, settings in (("ops", {}), ("jobs", {"type": "fifo"})):
            await self.ann.join(channel)
            await self.ann.configure(channel, persist=True, **settings)
            await self.bob.join(channel)
        works = (self.listen(), self.say(), self.push(), self.pop(), self.join())
        self.tasks = [asyncio.create_task(work) for work in works]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.ann.close()
        await self.bob.close()

    async def listen(self) -> None:
        async for item in self.bob.news():
            if isinstance(item, Heard):
                self.heard.append(item.seq)
            elif isinstance(item, Gap):
                self.gaps.append(item)

    async def say(self) -> None:
        while True:
            self.count += 1
            payloads = [b"%d.%d" % (self.count, n) for n in range(20)]
            numbers = await self.tried(self.ann.broadcast_many("ops", payloads))
            for seq, payload in zip(numbers or (), payloads, strict=False):
                if seq in self.acked:
                    self.twice.append(seq)
                self.acked[seq] = payload

    async def push(self) -> None:
        number = 0
        while True:
            number += 1
            payload = b"job %d" % number
            self.maybe_pushed.add(payload)
            if await self.tried(self.ann.push("jobs", payload), fine=True):
                self.pushed.append(payload)

    async def pop(self) -> None:
        while True:
            payload = await self.tried(self.bob.pop("jobs"))
            if payload:
                self.popped.append(payload)

    async def join(self) -> None:
        number = 0
        while True:
            number += 1
            name = f"side/{number}"
            if await self.tried(self.ann.join(name), fine=True) and await self.tried(
                self.ann.configure(name, persist=True), fine=True
            ):
                self.joined.add(f"!{name}@localhost")
            await asyncio.sleep(0.05)

    @staticmethod
    async def tried(work: Awaitable[Any], *, fine: Any = None) -> Any:
        try:
            found = await work
        except Refused:
            await asyncio.sleep(0.005)
            return None
        except PenstockError:  # the server was killed meanwhile: nobody knows whether it was done
            await asyncio.sleep(0.01)
            return None
        return found if fine is None else fine


def fill(folder: Path, channels: int, members: int) -> None:
    """Lay out channels with members before the first start."""
    store = FileChannelStore(str(folder))
    names = tuple(sorted(Nid(f"m{n:06}", "localhost") for n in range(members)))
    config = StoredConfig(100_000, 65_536, 1_000_000, True, 0)
    batch = [PersistedChannel(f"old/{n}", names[0], config, members=names) for n in range(channels)]
    for start_at in range(0, channels, 256):
        store.save_many(batch[start_at : start_at + 256])


async def test_no_kill_of_the_server_loses_or_doubles_anything(tmp_path: Path, long_run: bool) -> None:
    rounds, channels, members = (LONG_ROUNDS, 1000, 100) if long_run else (3, 20, 10)
    folder = tmp_path / "data"
    folder.mkdir()
    fill(folder, channels, members)
    rng = random.Random(5)
    starts: list[float] = []
    process, port = await asyncio.to_thread(start, folder, 0)
    load = Load(f"plain://127.0.0.1:{port}")
    try:
        await load.open()
        for _ in range(rounds):
            before = len(load.acked), len(load.heard)
            async with asyncio.timeout(120):
                while len(load.acked) < before[0] + 20 or len(load.heard) < before[1] + 20:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(rng.uniform(0, 0.2))
            process.kill()
            await asyncio.to_thread(process.wait)
            begun = time.monotonic()
            process, _ = await asyncio.to_thread(start, folder, port)
            starts.append(time.monotonic() - begun)
        print(f"{rounds} kills, {channels * members:,} members: up again within {max(starts):.1f} s")
        async with asyncio.timeout(120):
            while not await Load.tried(load.ann.broadcast("ops", b"the end")):
                pass
            last = (await load.ann.range("ops"))[1]
            while not load.heard or load.heard[-1] < last - 100:
                await asyncio.sleep(0.01)
        await load.close()
        async with await Client.connect(load.address, token=ANN) as ann:
            mine = set(await ann.channels())
            _, last = await ann.range("ops")
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
    assert not load.twice
    assert not load.gaps
    assert load.heard == sorted(set(load.heard)), "heard twice or out of order"
    stored = stored_messages(folder)
    assert {seq: stored.get(seq) for seq in load.acked} == load.acked
    told = [seq for seq in stored if load.heard[0] <= seq <= load.heard[-1]]
    assert load.heard == told, "a hole in what was heard"
    assert len(load.popped) == len(set(load.popped)), "handed out twice"
    assert set(load.popped) <= load.maybe_pushed
    assert load.joined <= mine


def stored_messages(folder: Path) -> dict[int, bytes]:
    from penstock.channels import channel_hash

    found: dict[int, bytes] = {}
    with MessageLogReader(str(folder / channel_hash("ops"))) as log:
        at = 1
        while entries := list(log.entries(at, 10_000)):
            found |= {entry.seq: entry.payload for entry in entries}
            at = entries[-1].seq + 1
    return found
