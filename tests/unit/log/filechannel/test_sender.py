"""Promises of the sending side."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from open_files import open_files

from penstock.batch import Batch, Spans
from penstock.disk import Backoff, MemoryDisk, PosixDisk
from penstock.errors import ClosedError, LockedError, OptionsError, ReadOnlyError, Timeout
from penstock.log.filechannel import ChannelOptions, FileChannel, FileChannelLog
from penstock.log.filechannel.format import Header
from penstock.testing.faulty import FaultyDisk
from penstock.testing.log_conformance import contents

FAST = ChannelOptions(sync="none", compression="none")


def test_five_messages_come_back_in_order(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel, channel.tx() as tx:
        sent = [bytes(range(n)) for n in range(1, 6)]
        for payload in sent:
            tx.send(payload)
        rx = channel.rx()
        assert [rx.recv(timeout=1) for _ in sent] == sent
        assert rx.try_recv() is None


def test_messages_are_received_in_the_order_of_sending_whoever_sends(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", ChannelOptions(sync="none", segment_bytes=4000)) as channel:

        def work(number: int) -> None:
            with channel.tx() as tx:
                for step in range(200):
                    if step % 2:
                        tx.send(b"%d:%d" % (number, step))
                    else:
                        tx.send_many([b"%d:%d" % (number, step)])

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [p for batch in channel.rx().batches(timeout=0) for p in batch.to_payloads()]
    assert len(found) == 800
    for number in range(4):
        mine = [p for p in found if p.startswith(b"%d:" % number)]
        assert mine == [b"%d:%d" % (number, step) for step in range(200)]


def test_a_send_returns_its_position_and_a_batch_all_of_them(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        tx = channel.tx()
        assert tx.send(b"") == 0
        assert tx.send_many([b"abc", b"", b"x"]).tolist() == [8, 19, 27]
        assert tx.send_many(Batch.of([b"one", b"two"])).tolist() == [36, 47]
        assert tx.write_position == 58
        assert tx.send_many([]).tolist() == []


def test_a_segment_is_sealed_by_the_send_behind_its_threshold(tmp_path: Path) -> None:
    options = ChannelOptions(sync="none", segment_bytes=20, compression="none")
    one, many = tmp_path / "one", tmp_path / "many"
    payloads = [b"x" * 11, b"", b"y" * 100, b"z", b"w" * 3]
    with FileChannel.open(one, options) as channel:
        for payload in payloads:
            channel.append(payload)
    with FileChannel.open(many, options) as channel:
        channel.append_many(payloads)
    files = {p.name: p.read_bytes() for p in one.iterdir() if p.name.startswith("segment")}
    assert {name: len(data) - 64 for name, data in files.items()} == {
        "segment.0": 27, "segment.1": 108, "segment.2": 20,
    }  # fmt: skip
    assert {p.name: p.read_bytes() for p in many.iterdir() if p.name.startswith("segment")} == files


def test_a_channel_whose_numbers_are_used_up_refuses_and_stays_readable(tmp_path: Path) -> None:
    options = ChannelOptions(sync="none", segment_bytes=20, compression="none", collect=False)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "segment.4294967295").write_bytes(Header(4294967295, 1000).encode())
    with FileChannel.open(tmp_path / "c", options) as channel:
        assert channel.append(b"x" * 20) == 1000
        for send in (lambda: channel.append(b"more"), lambda: channel.append_many([b"more"])):
            with pytest.raises(OptionsError, match="used up"):
                send()
        assert [p for batch in channel.rx().batches(timeout=0) for p in batch.to_payloads()] == [b"x" * 20]
    (tmp_path / "c" / "segment.4294967295").write_bytes(Header(4294967295, (1 << 63) - 20).encode())
    with FileChannel.open(tmp_path / "c", options) as channel:
        assert channel.append(b"last") == (1 << 63) - 20
        with pytest.raises(OptionsError, match="positions of this channel are used up"):
            channel.append(b"")


def test_waiting_for_other_senders_can_time_out_and_sends_nothing(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        channel._spool._lock.acquire()
        with pytest.raises(Timeout):
            channel.tx().send(b"x", timeout=0.01)
        with pytest.raises(Timeout):
            channel.tx().send_many([b"x"], timeout=0)
        channel._spool._lock.release()
        assert channel.stats().write_position == 0
        assert channel.tx().send(b"y", timeout=1) == 0


def test_a_payload_without_bytes_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        for wrong in (None, "text", 5):
            with pytest.raises(TypeError):
                channel.append(wrong)
        with pytest.raises(TypeError):
            channel.append_many([b"good", "text"])
        assert channel.stats().write_position == 0


def test_kinds_have_no_room(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        with pytest.raises(OptionsError):
            channel.append(b"x", kind=1)
        with pytest.raises(OptionsError):
            channel.append_many([b"x"], kind=np.array([3]))


def test_closing_a_sender_twice_is_fine_and_ends_only_that_sender(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        tx, other = channel.tx(), channel.tx()
        tx.close()
        tx.close()
        with pytest.raises(ClosedError):
            tx.send(b"x")
        with pytest.raises(ClosedError):
            tx.send_many([b"x"])
        other.send(b"y")
    with pytest.raises(ClosedError):
        other.send(b"z")
    with pytest.raises(ClosedError):
        channel.tx()


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", FAST), pytest.raises(LockedError):
        FileChannel.open(tmp_path / "c", FAST)
    FileChannel.open(tmp_path / "c", FAST).close()


def workers() -> set[threading.Thread]:
    """The threads of channels; those of the group commit stay for the next one."""
    return {thread for thread in threading.enumerate() if thread.name in ("penstock-flush", "penstock-pack")}


@pytest.mark.parametrize("operation", ["list", "open", "modify", "stat", "sync_folder"])
def test_a_channel_that_cannot_be_opened_leaves_neither_its_lock_nor_a_descriptor(
    tmp_path: Path, operation: str
) -> None:
    options = ChannelOptions(segment_bytes=20, compression="none", flush_seconds=0.01)
    with FileChannel.open(tmp_path / "c", options) as channel:
        channel.append_many([b"message %d" % n for n in range(10)])
    before = workers()
    for step in range(100):
        disk, calls = PosixDisk(), itertools.count()
        real = getattr(disk, operation)

        def call(path: str, step: int = step, calls: Any = calls, real: Any = real) -> Any:
            if next(calls) == step:
                raise OSError(errno.EIO, "Input/output error")
            return real(path)

        setattr(disk, operation, call)
        with contextlib.suppress(OSError, ReadOnlyError):
            FileChannel.open(str(tmp_path / "c"), options, disk=disk).close()
        if next(calls) <= step:
            break  # there are no more such calls in an opening and a closing
        assert open_files(tmp_path) == [], step
        assert workers() <= before
        FileChannel.open(tmp_path / "c", options).close()  # whatever went wrong, the next one may
    assert 0 < step < 99


def test_a_missing_folder_is_made_unless_told_otherwise(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="no channel here"):
        FileChannel.open(tmp_path / "c", ChannelOptions(create=False))
    FileChannel.open(tmp_path / "c").close()
    FileChannel.open(tmp_path / "c", ChannelOptions(create=False)).close()


# --- Errors


def no_room() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")  # a new one: it keeps the frames that it was raised in


@pytest.mark.parametrize("operation", ["write_at", "create", "rename", "sync_folder", "modify", "own"])
@pytest.mark.parametrize("sync", ["none", "interval", "always"])
def test_a_queue_without_room_goes_on_when_there_is_some(operation: str, sync: Any) -> None:
    disk = FaultyDisk(MemoryDisk())
    options = ChannelOptions(sync=sync, sync_seconds=60, segment_bytes=50, compression="none", collect=False)
    channel = FileChannel.open("c", options, disk=disk)
    acked = [(channel.append(b"%04d" % n) and n) or n for n in range(6)]
    refused = []

    def fail(called: str, path: str) -> None:
        if called == operation and "segment" in path + "segment" * (called in ("create", "rename", "sync_folder")):
            raise no_room()

    disk.on_call = fail
    for number in range(6, 20):
        try:
            channel.append(b"%04d" % number)
            acked.append(number)
        except OSError as exc:
            assert exc.errno == errno.ENOSPC
            refused.append(number)
    disk.on_call = None
    assert refused or (operation in ("sync_folder", "modify") and sync == "none")
    for number in range(20, 26):
        channel.append(b"%04d" % number)
        acked.append(number)
    channel.sync()
    found = [int(p) for batch in channel.rx().batches(timeout=0) for p in batch.to_payloads()]
    channel.close()
    assert [number for number in found if number not in refused] == acked
    assert found == sorted(set(found))
    with FileChannel.attach("c", disk=disk) as view:
        assert [int(p) for batch in view.rx().batches(timeout=0) for p in batch.to_payloads()] == found
    with FileChannel.open("c", options, disk=disk) as again:
        assert again.problems == []


def test_a_queue_on_a_full_file_system_goes_on_when_there_is_room(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, str(tmp_path / "c")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["File", "too", "large", "True", "True"], done.stdout + done.stderr


AGAIN = """
import resource, signal, sys
from penstock.log.filechannel import ChannelOptions, FileChannel
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
channel = FileChannel.open(sys.argv[1], ChannelOptions(sync="always", compression="none"))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
sent = []
try:
    while True:
        channel.append(b"%08d" % len(sent) + b"x" * 92)
        sent.append(len(sent))
except OSError as exc:
    print(exc.strerror, exc.filename.endswith("segment.0"))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
for number in range(len(sent), 200):
    channel.append(b"%08d" % number + b"x" * 92)
print([int(p[:8]) for b in channel.rx().batches(timeout=0) for p in b.to_payloads()] == list(range(200)))
channel.close()
"""


@pytest.mark.parametrize("operation", ["sync", "truncate"])
def test_what_leaves_doubt_makes_the_channel_read_only_until_it_is_reopened(operation: str) -> None:
    disk = FaultyDisk(MemoryDisk())
    options = ChannelOptions(sync="always", segment_bytes=50, compression="none", collect=False)
    channel = FileChannel.open("c", options, disk=disk)
    kept = [b"kept %d" % n for n in range(6)]
    for payload in kept:
        channel.append(payload)
    disk.fail(operation, no_room(), path="c/segment")
    if operation == "truncate":
        disk.fail("write_at", no_room(), path="c/segment")
    with pytest.raises(ReadOnlyError, match="No space left"):
        [channel.append(b"late %d" % number) for number in range(8)]
    with pytest.raises(ReadOnlyError, match="No space left"):
        channel.append_many([b"never"])
    assert channel.stats().error is not None
    rx = channel.rx()
    assert [rx.recv(timeout=1) for _ in kept] == kept
    channel.close()
    with FileChannel.open("c", options, disk=disk) as again:
        again.append(b"goes on")
        found = [p for batch in again.rx().batches(timeout=0) for p in batch.to_payloads()]
    assert found[: len(kept)] == kept
    assert found[-1] == b"goes on"


def test_a_failed_write_leaves_no_part_of_its_message() -> None:
    disk = FaultyDisk(MemoryDisk())
    channel = FileChannel.open("c", FAST, disk=disk)
    channel.append(b"whole")
    size = disk.stat("c/segment.0").size  # type: ignore[union-attr]

    def half(operation: str, path: str) -> None:
        if operation == "write_at" and path.endswith("segment.0"):
            with disk._inner.modify("c/segment.0") as file:
                file.write_at(size, b"\0\0\0\x20half")
            raise OSError(errno.EIO, "Input/output error")

    disk.on_call = half
    with pytest.raises(OSError, match="Input/output"):
        channel.append(b"x" * 32)
    disk.on_call = None
    assert disk.stat("c/segment.0").size == size  # type: ignore[union-attr]
    channel.append(b"next")
    assert channel.rx().recv_many().to_payloads() == [b"whole", b"next"]
    channel.close()


FULL = """
import resource, signal, sys
from penstock.log.filechannel import ChannelOptions, FileChannel
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
channel = FileChannel.open(sys.argv[1], ChannelOptions(sync="none", compression="none"))
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
sent = 0
try:
    while True:
        channel.append(b"%08d" % sent + b"x" * 92)
        sent += 1
except OSError as exc:
    print(sent, exc)
"""


def test_a_full_disk_loses_nothing_that_was_sent(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path / "c")], capture_output=True, text=True, check=True)
    sent = int(done.stdout.split()[0])
    assert sent == (10_000 - 64) // 108
    assert "File too large" in done.stdout
    with FileChannel.open(tmp_path / "c", FAST) as channel:
        assert channel.problems == []  # the half-written frame was taken back at once
        found = [p[:8] for batch in channel.rx().batches(timeout=0) for p in batch.to_payloads()]
        assert found == [b"%08d" % n for n in range(sent)]
        channel.append(b"room again")


@pytest.mark.parametrize("flush_seconds", [0.0, 3600.0])
def test_a_message_that_no_frame_holds_is_refused_and_changes_nothing(flush_seconds: float) -> None:
    """Its length would not fit: the original writes a wrong one, and every receiver stops there."""
    options = ChannelOptions(sync="none", segment_bytes=1 << 20, flush_seconds=flush_seconds)
    huge = mmap.mmap(-1, (1 << 32) + 100)  # never touched, so it takes no memory
    spans = Spans(np.array([0, 0, 0]), np.array([2 << 20, 1 << 32, 5]))  # the first alone fills a segment
    with FileChannel.open("c", options, disk=MemoryDisk()) as channel:
        with pytest.raises(OptionsError, match="a frame holds at most 4294967295"):
            channel.append(huge)
        with pytest.raises(OptionsError, match="a frame holds at most 4294967295"):
            channel.append_many(Batch(huge, np.arange(3), spans, next_position=3))
        channel.flush()
        assert channel.append(b"next") == 0
        channel.flush()
        assert channel.rx().recv(timeout=0) == b"next"


# --- Buffered


def test_buffered_sends_become_visible_within_the_interval(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", ChannelOptions(sync="none", flush_seconds=0.02)) as channel:
        rx = channel.rx()
        channel.append(b"one")
        assert channel.stats().write_position == 11
        assert rx.recv(timeout=60) == b"one"
        channel.append(b"two")
        channel.flush()
        assert rx.try_recv() == b"two"


def test_a_large_buffer_is_written_without_waiting(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", ChannelOptions(sync="none", flush_seconds=3600)) as channel:
        rx = channel.rx()
        channel.append(b"x")
        assert rx.try_recv() is None
        channel.append(b"y" * (64 << 10))
        assert rx.try_recv() == b"x"
        channel.append(b"z")
        channel.close()
        assert [rx.try_recv(), rx.try_recv()] == [b"y" * (64 << 10), b"z"]


def test_a_buffered_flush_that_fails_reaches_the_next_send() -> None:
    disk = FaultyDisk(MemoryDisk())
    channel = FileChannel.open("c", ChannelOptions(sync="none", flush_seconds=0.005), disk=disk)
    failing = threading.Event()

    def fail(operation: str, path: str) -> None:
        if operation == "write_at" and "segment" in path:
            failing.set()
            raise OSError(errno.EIO, "Input/output error")

    disk.on_call = fail
    channel.append(b"late")
    assert failing.wait(60)
    assert Backoff().wait(lambda: channel._spool._flusher.error is not None, 60)  # type: ignore[union-attr]
    with pytest.raises(OSError, match="Input/output error"):
        channel.append(b"refused")
    disk.on_call = None
    channel.append(b"x")
    channel.flush()
    assert channel.rx().recv_many().to_payloads() == [b"late", b"x"]
    channel.close()


# --- Durable

# no compressor: its thread would outlive the machine whose power is cut
DURABLE = ChannelOptions(sync="always", segment_bytes=40, compression="none")


def test_a_synced_send_has_reached_the_disk_with_its_name() -> None:
    disk = FaultyDisk(MemoryDisk())
    channel = FileChannel.open("c", DURABLE, disk=disk)
    for number in range(10):
        channel.append(b"message %d" % number)
    disk.cut_power(keep=0)
    channel.forked()
    with FileChannel.open("c", FAST, disk=disk) as again:
        found = [p for batch in again.rx().batches(timeout=0) for p in batch.to_payloads()]
    assert found == [b"message %d" % n for n in range(10)]


def test_with_an_interval_messages_become_durable_by_themselves() -> None:
    disk = FaultyDisk(MemoryDisk())
    channel = FileChannel.open("c", dataclasses.replace(DURABLE, sync="interval", sync_seconds=0.01), disk=disk)
    for number in range(10):
        channel.append(b"message %d" % number)
    deadline = time.monotonic() + 60
    while channel.stats().durable_position != channel.stats().write_position and time.monotonic() < deadline:
        time.sleep(0.01)
    disk.cut_power(keep=0)
    channel.forked()
    with FileChannel.open("c", FAST, disk=disk) as again:
        found = [p for batch in again.rx().batches(timeout=0) for p in batch.to_payloads()]
    assert found == [b"message %d" % n for n in range(10)]


def test_the_group_commit_serves_many_senders_at_once(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", ChannelOptions(sync="always")) as channel:
        threads = [threading.Thread(target=lambda: channel.append(b"x")) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert channel.stats().durable_position == channel.stats().write_position == 72


def test_opening_reads_only_the_newest_segment(tmp_path: Path) -> None:
    options = ChannelOptions(sync="none", segment_bytes=1000, compression="none")
    with FileChannel.open(tmp_path / "c", options) as channel:
        channel.append_many([b"x" * 100] * 200)
        newest = f"segment.{channel._spool.index}"
    disk = FaultyDisk(PosixDisk())
    with FileChannel.open(str(tmp_path / "c"), options, disk=disk):
        read = {
            os.path.basename(path) for operation, path in disk.calls if operation in ("read_at", "read_into", "map")
        }
    assert {name for name in read if name.startswith("segment")} == {newest}


def test_a_killed_writer_leaves_a_channel_another_process_reads(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from penstock.log.filechannel import ChannelOptions, FileChannel\n"
        "channel = FileChannel.open(sys.argv[1], ChannelOptions(sync='none'))\n"
        "channel.append_many([b'%d' % n for n in range(1000)])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], check=False)
    with FileChannelLog(tmp_path / "c") as log:
        assert contents(log) == [b"%d" % n for n in range(1000)]
