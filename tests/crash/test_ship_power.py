"""A power cut here and where the objects are, between any two steps of shipping: the head names only what is there.

What it names is whole, and this machine still has it or never needs it again: the log goes on where it was.
"""

from __future__ import annotations

import contextlib

import pytest
from blake3 import blake3
from edge_use import Killed
from queue_use import lose_power
from ship_use import fill, read_all

from penstock.disk import MemoryDisk
from penstock.disk.failpoint import arm
from penstock.disk.folderstore import FolderStore
from penstock.log.detect import open_log
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.ship import ShipOptions, Shipper
from penstock.ship.fence import read_head
from penstock.ship.remote import ShippedLog
from penstock.ship.segments import sealed_segments
from penstock.testing.faulty import FaultyDisk

POINTS = [
    "ship.fence.before", "ship.fence.after", "ship.put.before", "ship.put.after", "ship.page.after",
    "ship.swap.before", "ship.swap.after", "ship.cursor.before", "ship.cursor.after", "ship.nothing",
]  # fmt: skip
SEGMENTS = 6


def writer_of(format: str, disk: FaultyDisk) -> MessageLog | FileChannel:
    """Return a writer that syncs nothing by itself."""
    if format == "messagelog":
        return MessageLog.open("log", MessageLogOptions(segment_bytes=100_000_000, sync="none"), disk=disk)
    options = ChannelOptions(sync="interval", sync_seconds=1e9, compression="none", collect=False)
    return FileChannel.open("log", options, disk=disk)


def copy_of(disk: FaultyDisk) -> FaultyDisk:
    """Return another disk with the same log on it, of which no sealed segment is synced."""
    other = FaultyDisk(MemoryDisk())
    other.make_folder("log")
    with open_log("log", disk=disk) as log:
        sealed = {path for segment in sealed_segments(disk, log, 0) for path in segment.paths()}
    assert len(sealed) >= SEGMENTS
    for name in disk.list("log"):
        with disk.open(f"log/{name}") as source, other.create(f"log/{name}") as file:
            file.write_at(0, source.read_at(0, source.stat().size))
            if f"log/{name}" not in sealed:
                file.sync()
    other.sync_folder("log")
    return other


@pytest.mark.parametrize("keep", [0.0, 0.5])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("format", ["messagelog", "filechannel"])
def test_what_a_head_names_survives_a_power_cut_on_both_sides(format: str, point: str, keep: float) -> None:
    here, there = FaultyDisk(MemoryDisk()), FaultyDisk(MemoryDisk())
    store, options = FolderStore("up", there), ShipOptions(page_entries=2, batch_bytes=200)
    writer = writer_of(format, here)
    wanted: list[bytes] = []
    for _ in range(SEGMENTS):
        wanted += fill(format, writer, len(wanted), 3)
    visits = 0

    def die_later() -> None:
        nonlocal visits
        visits += 1
        if visits == 2 or point.startswith("ship.fence"):
            raise Killed

    shipper = None
    try:
        with arm(point, die_later):
            shipper = Shipper("log", store, options=options, disk=here)
            while shipper.step():
                pass
    except Killed:
        assert point != "ship.nothing"
    else:
        assert point == "ship.nothing"
    if shipper is not None:
        shipper.close()

    here.cut_power(seed=len(point), keep=keep)
    there.cut_power(seed=len(point) + 1, keep=keep)
    lose_power(writer) if isinstance(writer, FileChannel) else writer.forked()
    found = read_head(store, "log")
    if found is not None:
        with ShippedLog("up/log", store) as shipped:
            assert list(shipped.verify()) == []
            assert read_all(shipped) == wanted[: found[0].records]
        with open_log("log", disk=here) as log:
            assert log.next_position >= found[0].next
    with writer_of(format, here) as again:
        with open_log("log", disk=here) as log:
            kept = read_all(log)
        kept += fill(format, again, len(wanted), 3)
        with Shipper("log", store, options=options, disk=here) as shipper:
            while shipper.step():
                pass
    with ShippedLog("up/log", store) as shipped:
        assert read_all(shipped) == kept
        assert list(shipped.verify()) == []


@pytest.mark.parametrize("batch_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("format", ["messagelog", "filechannel"])
def test_a_segment_that_nobody_synced_is_synced_before_the_head_names_it(format: str, batch_bytes: int) -> None:
    made, there = FaultyDisk(MemoryDisk()), FaultyDisk(MemoryDisk())
    with writer_of(format, made) as writer:
        for number in range(SEGMENTS):
            fill(format, writer, 3 * number, 3)
    here, store = copy_of(made), FolderStore("up", there)  # writers sync what they seal; who copies a log does not

    def die() -> None:
        raise Killed

    with (
        contextlib.suppress(Killed),
        arm("ship.swap.after", die),
        Shipper("log", store, options=ShipOptions(batch_bytes=batch_bytes), disk=here) as shipper,
    ):
        shipper.step()
    here.cut_power(keep=0)
    found = read_head(store, "log")
    assert found is not None
    assert found[0].segments
    for entry in found[0].segments:
        for name, size, digest in [
            (entry.name, entry.bytes, entry.blake3),
            *((e.name, e.bytes, e.blake3) for e in entry.extra),
        ]:
            with here.open(f"log/{name}") as file:
                assert blake3(file.read_at(0, size)).hexdigest() == digest
