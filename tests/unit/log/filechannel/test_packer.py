"""Compressing in the background loses nothing, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from penstock.disk import MemoryDisk
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.filechannel.packer import Packer
from penstock.testing.faulty import FaultyDisk

LOAD = [b"message %03d " % n * 5 for n in range(200)]


def options(**more: object) -> ChannelOptions:
    return ChannelOptions(**{"sync": "none", "segment_bytes": 1000, **more})  # type: ignore[arg-type]


def names(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.startswith("segment."))


def drain(rx: object) -> list[bytes]:
    return [p for batch in rx.batches(timeout=0) for p in batch.to_payloads()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["snappy", "gzip"])
def test_all_but_the_two_newest_are_compressed(tmp_path: Path, method: str) -> None:
    with FileChannel.open(tmp_path / "c", options(compression=method)) as channel:
        for payload in LOAD:
            channel.append(payload)
        deadline = time.monotonic() + 60
        while sum(not name.endswith(".z") for name in names(tmp_path / "c")) != 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        newest = channel._spool.index
        plain = [name for name in names(tmp_path / "c") if not name.endswith(".z")]
        assert sorted(plain) == sorted([f"segment.{newest}", f"segment.{newest - 1}"])
        assert drain(channel.rx()) == LOAD


def test_a_receiver_keeps_its_segment_while_it_is_compressed_and_collected(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", options(compression="none")) as channel:
        channel.append_many(LOAD)
    with FileChannel.attach(tmp_path / "c") as view:
        rx = view.rx()
        assert rx.recv() == LOAD[0]
        with FileChannel.open(tmp_path / "c", options()) as channel:
            channel.compact()
            assert "segment.0.z" in names(tmp_path / "c")
            assert [rx.recv(timeout=1) for _ in LOAD[1:]] == LOAD[1:]


def test_a_collected_segment_never_comes_back() -> None:
    disk = FaultyDisk(MemoryDisk())
    channel = FileChannel.open("c", options(compression="none"), disk=disk)
    channel.append_many(LOAD)
    packer = Packer(disk, channel.folder, "snappy", channel._retention)
    rx = channel.rx()

    def collect(operation: str, path: str) -> None:
        if operation == "sync" and path.endswith("segment.0.z.ing"):
            disk.on_call = None
            drain(rx)

    disk.on_call = collect
    packer.run()
    assert [name for name in disk.list("c") if name.startswith("segment.0")] == []
    channel.close()


@pytest.mark.parametrize("operation", ["create", "write_at", "sync", "rename", "sync_folder", "remove", "read_at"])
def test_a_failing_disk_leaves_the_messages_readable(operation: str) -> None:
    disk = FaultyDisk(MemoryDisk())
    with FileChannel.open("c", options(compression="none"), disk=disk) as channel:
        channel.append_many(LOAD)
    with FileChannel.open("c", options(compression="none"), disk=disk) as channel:
        packer = Packer(disk, channel.folder, "snappy", channel._retention)
        disk.fail(operation, OSError(errno.EIO, "Input/output error"), path="c" if operation == "sync_folder" else ".z")
        packer.run()
        assert drain(channel.ack_rx()) == LOAD
    with FileChannel.open("c", options(), disk=disk) as channel:
        channel.compact()
        assert drain(channel.ack_rx()) == LOAD


def test_what_could_not_be_compressed_is_tried_again_by_hand() -> None:
    disk = FaultyDisk(MemoryDisk())
    with FileChannel.open("c", options(compression="none"), disk=disk) as channel:
        channel.append_many(LOAD)
    disk.fail("create", OSError(errno.ENOSPC, "No space left on device"), path="segment.0.z.ing")
    with FileChannel.open("c", options(collect=False), disk=disk) as channel:
        channel._packer.run()  # type: ignore[union-attr]
        assert "segment.0" in disk.list("c")
        channel._packer.run()  # type: ignore[union-attr]  # the worker leaves it at that
        assert "segment.0" in disk.list("c")
        channel.compact()
        assert "segment.0.z" in disk.list("c")
        assert drain(channel.ack_rx()) == LOAD


def test_a_crash_at_any_step_of_a_compression_loses_nothing() -> None:
    for step in range(40):
        disk = FaultyDisk(MemoryDisk())
        with FileChannel.open(
            "c", ChannelOptions(sync="always", segment_bytes=2000, compression="none"), disk=disk
        ) as c:
            c.append_many(LOAD[:60])
        channel = FileChannel.open("c", options(compression="none", segment_bytes=2000), disk=disk)
        packer = Packer(disk, channel.folder, "snappy", channel._retention)
        calls = 0

        class Cut(BaseException):
            pass

        def count(operation: str, path: str, last: int = step * 3) -> None:
            nonlocal calls
            calls += 1
            if calls > last:
                raise Cut

        disk.on_call = count
        try:
            packer.run()
        except Cut:
            pass
        disk.on_call = None
        disk.cut_power(seed=step, keep=0.5)
        channel.forked()
        with FileChannel.open("c", options(compression="none"), disk=disk) as again:
            rx = again.ack_rx(on_damage="raise")
            assert drain(rx) == LOAD[:60], step


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "penstock-pack"}


def test_closing_gives_up_what_is_under_way(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", options(compression="none", segment_bytes=200)) as channel:
        channel.append_many(LOAD * 5)
    before = workers()
    FileChannel.open(tmp_path / "c", options(segment_bytes=200)).close()
    assert workers() <= before
    assert not [name for name in names(tmp_path / "c") if name.endswith(".ing")]
    with FileChannel.open(tmp_path / "c", options()) as channel:
        assert drain(channel.ack_rx()) == LOAD * 5


def test_a_damaged_plain_segment_stays_plain(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", options(compression="none")) as channel:
        channel.append_many(LOAD)
    path = tmp_path / "c" / "segment.1"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with FileChannel.open(tmp_path / "c", options()) as channel:
        channel.compact()
        assert "segment.1" in names(tmp_path / "c")
        assert "segment.2.z" in names(tmp_path / "c")
