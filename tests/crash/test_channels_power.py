"""Promise: what a persistent channel acknowledged survives a power cut, whatever of the rest the disk kept."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import wait
from typing import Any

import pytest

from penstock.channels import ChannelManager, Limits, ManagerOptions
from penstock.disk import MemoryDisk
from penstock.errors import Refused
from penstock.testing.faulty import FaultyDisk

OWNER = "owner@localhost"


def options(sync_on_loop_seconds: float = 60) -> ManagerOptions:
    limits = Limits(max_history_limit=1 << 20)
    return ManagerOptions(limits=limits, segment_bytes=512, sync_on_loop_seconds=sync_on_loop_seconds)


class PowerCut(BaseException):
    """Not an OSError: nothing may catch it and go on."""


async def live(disk: FaultyDisk, seed: int, seconds: float) -> tuple[dict[str, Any], str]:
    """Change two channels until the power goes in the middle of something; return what was acknowledged."""
    rng = random.Random(seed)
    manager = await ChannelManager.open("data", options(seconds), disk=disk)
    ops, jobs = manager.channel("ops"), manager.channel("jobs")
    for channel, kind in ((ops, "pubsub"), (jobs, "fifo")):
        await channel.join(OWNER)
        await channel.configure(OWNER, persist=True, type=kind)
    left = rng.randrange(1, 120)

    def on_call(name: str, path: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise PowerCut

    acknowledged: dict[str, Any] = {"members": {OWNER}, "stored": [], "queue": [], "popped": []}
    disk.on_call = on_call
    pending = ""
    try:
        for turn in range(1000):
            kind, text = rng.choice(("join", "leave", "broadcast", "push", "pop")), f"message {turn}"
            pending = f"{kind} {text}"
            if kind == "join":
                await ops.join(f"user{turn}@localhost")
                acknowledged["members"].add(f"user{turn}@localhost")
            elif kind == "leave":
                others = sorted(acknowledged["members"] - {OWNER})
                if others:
                    pending = f"leave {others[0]}"
                    await ops.leave(others[0])
                    acknowledged["members"].discard(others[0])
            elif kind == "broadcast":
                await ops.broadcast(OWNER, text.encode())
                acknowledged["stored"].append(text)
            elif kind == "push":
                await jobs.push(OWNER, text.encode())
                acknowledged["queue"].append(text)
            else:
                try:
                    acknowledged["popped"].append((await jobs.pop(OWNER)).payload.decode())
                except Refused:
                    continue
                acknowledged["queue"].pop(0)
    except PowerCut:
        pass
    disk.on_call = None
    wait(manager._working)  # what was under way when the power went
    return acknowledged, pending


@pytest.mark.parametrize("seconds", [0, 60], ids=["in threads", "on the loop"])
@pytest.mark.parametrize("seed", range(25))
def test_what_was_acknowledged_survives_a_power_cut(seed: int, seconds: float) -> None:
    inner = MemoryDisk()
    disk = FaultyDisk(inner)
    # A cut is not an Exception, so it passes through the manager like the death of the process does.
    acknowledged, pending = asyncio.run(live(disk, seed, seconds))
    disk.cut_power(seed=seed)
    inner._locks.clear()  # who held them is dead
    asyncio.run(check(disk, acknowledged, pending))


async def check(disk: FaultyDisk, acknowledged: dict[str, Any], pending: str) -> None:
    async with await ChannelManager.open("data", options(), disk=disk) as manager:
        assert manager.broken == {}
        ops, jobs = manager.channel("ops"), manager.channel("jobs")
        kind, _, text = pending.partition(" ")
        members = {str(nid) for nid in await ops.members(OWNER)}
        name = f"user{text.split()[-1]}@localhost" if kind == "join" else text
        assert members ^ acknowledged["members"] <= ({name} if kind in ("join", "leave") else set())
        stored = [entry.payload.decode() for entry in await ops.history(OWNER, 1, 1 << 20)]
        assert stored[: len(acknowledged["stored"])] == acknowledged["stored"]
        assert stored[len(acknowledged["stored"]) :] in ([], [text])
        waiting = [(await jobs.pop(OWNER)).payload.decode() for _ in range(await jobs.length(OWNER))]
        expected = [acknowledged["queue"]]
        if kind == "push":
            expected.append([*acknowledged["queue"], text])
        if kind == "pop":
            expected.append(acknowledged["queue"][1:])
        assert waiting in expected
        assert not set(waiting) & set(acknowledged["popped"])
