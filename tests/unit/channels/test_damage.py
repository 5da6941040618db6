"""Promise: damage on disk is told in ``broken`` and never changes what a channel is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from channel_use import ANN, BOB, persistent

from penstock.channels import ChannelManager, ManagerOptions, channel_hash
from penstock.channels.store import NEW_QUEUE
from penstock.disk import PosixDisk
from penstock.errors import OptionsError
from penstock.testing.faulty import FaultyDisk

FOLDER = channel_hash("ops")


async def stored(start: Any, count: int = 9) -> Any:
    ops = await persistent(await start(ManagerOptions(segment_bytes=200)), "ops", ANN)
    for number in range(count):
        await ops.broadcast(ANN, b"message %d" % number * 3)
    return ops


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("which", [0, 1, -1], ids=["oldest", "middle", "newest"])
async def test_a_history_that_a_damaged_log_shortens_says_so(start: Any, tmp_path: Path, which: int) -> None:
    await stored(start)
    await (await start()).close()
    log = sorted((tmp_path / "data" / FOLDER).glob("*.log"))[which]
    flip(log, 40)
    manager = await start(ManagerOptions(segment_bytes=200))
    found = await manager.channel("ops").history(ANN)
    assert len(found) < 9
    assert log.name in manager.broken[FOLDER]
    with pytest.raises(OptionsError, match="is served"):  # damaged is not lost: the rest is still its members'
        await manager.discard("ops")
    await manager.channel("ops").join(BOB)
    again = await start(ManagerOptions(segment_bytes=200))
    await again.channel("ops").history(ANN)
    assert FOLDER in again.broken  # and it is said again after every start


async def test_a_torn_tail_is_no_damage(start: Any, tmp_path: Path) -> None:
    await stored(start, 2)
    await (await start()).close()
    log = max((tmp_path / "data" / FOLDER).glob("*.log"))
    log.write_bytes(log.read_bytes() + b"\x03\0\0\0\0")
    manager = await start()
    assert len(await manager.channel("ops").history(ANN)) == 2
    assert manager.broken == {}


async def test_a_queue_whose_type_is_damaged_does_not_come_back_as_a_plain_channel(start: Any, tmp_path: Path) -> None:
    jobs = await persistent(await start(), "jobs", ANN, type="fifo")
    await jobs.push(ANN, b"mend pump 7")
    await (await start()).close()
    metadata = tmp_path / "data" / channel_hash("jobs") / "metadata.bin"
    data = metadata.read_bytes()
    assert data[-1] == 1
    metadata.write_bytes(data[:-1] + b"\0")
    manager = await start()
    assert manager.handlers() == []
    assert "beside a queue's cursor" in manager.broken[channel_hash("jobs")]
    await manager.close()
    metadata.write_bytes(data)
    async with await ChannelManager.open(tmp_path / "data") as manager:
        assert (await manager.channel("jobs").pop(ANN)).payload == b"mend pump 7"


async def test_a_crash_while_a_channel_becomes_a_queue_leaves_the_channel_or_the_queue(tmp_path: Path) -> None:
    kinds = set()
    for step in range(40):
        root = tmp_path / str(step)
        disk = FaultyDisk(PosixDisk())
        manager = await ChannelManager.open(root, disk=disk)
        ops = await persistent(manager, "ops", ANN)
        await ops.broadcast(ANN, b"x")
        calls = iter(range(step))

        def fail(name: str, path: str, calls: Any = calls) -> None:
            if next(calls, None) is None:
                raise OSError(5, "Input/output error")

        disk.on_call = fail
        failed = False
        try:
            await ops.configure(ANN, type="fifo")
        except OSError:
            failed = True
        disk.on_call = None
        await manager.close()
        async with await ChannelManager.open(root) as manager:
            assert manager.broken == {}
            kinds.add((await manager.channel("ops").config(ANN))[1].word)
        if not failed:
            break
    assert not failed
    assert kinds == {"pubsub", "fifo"}


async def test_nothing_is_left_of_having_become_a_queue(start: Any, tmp_path: Path) -> None:
    await persistent(await start(), "ops", ANN, type="fifo")
    assert not (tmp_path / "data" / FOLDER / NEW_QUEUE).exists()
