"""Single sends that are stores to memory: the same bytes in the end, and nothing lost on the way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock import kernel
from penstock.errors import ReadOnlyError
from penstock.log.filechannel import ChannelOptions, FileChannel, FileChannelLog
from penstock.log.filechannel.room import ROOM_BYTES, ROOM_MARK, is_room
from penstock.log.filechannel.segments import Walk
from penstock.log.filechannel.spool import LEAST_SEGMENT_BYTES, SINGLES_BEFORE_ROOM

PLAIN = ChannelOptions(sync="none", compression="none")


def messages(count: int) -> list[bytes]:
    return [b"%d " % n + b"x" * (n * 7 % 90) for n in range(count)]


def send_singly(channel: FileChannel, payloads: list[bytes]) -> list[int]:
    tx = channel.tx()
    return [tx.send(payload) for payload in payloads]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return where a queue goes that will have room; it fails where it cannot, so that nothing here passes in vain."""
    with FileChannel.open(tmp_path / "probe", PLAIN) as channel:
        send_singly(channel, [b""] * (SINGLES_BEFORE_ROOM + 1))
        assert channel._spool.room is not None, "this file system, or this kernel, gives a queue no room"
    return tmp_path / "jobs"


def test_many_single_sends_leave_the_bytes_of_one_batch(folder: Path, tmp_path: Path) -> None:
    payloads = messages(20_000)  # several times the room
    with FileChannel.open(folder, PLAIN) as one, FileChannel.open(tmp_path / "batch", PLAIN) as other:
        assert send_singly(one, payloads) == other.append_many(payloads).tolist()
        assert one._spool.room is not None
    assert (folder / "segment.0").read_bytes() == (tmp_path / "batch" / "segment.0").read_bytes()


def test_segments_are_sealed_at_their_exact_length(folder: Path, tmp_path: Path) -> None:
    options = ChannelOptions(sync="none", compression="none", segment_bytes=LEAST_SEGMENT_BYTES)
    payloads = [b"%06d" % n + b"y" * 1000 for n in range(9_000)]
    with FileChannel.open(folder, options) as one, FileChannel.open(tmp_path / "batch", options) as other:
        send_singly(one, payloads)
        other.append_many(payloads)
        sealed = sorted(path.name for path in folder.glob("segment.*"))
        assert (folder / "segment.0").read_bytes() == (tmp_path / "batch" / "segment.0").read_bytes()
    assert len(sealed) == 3
    for name in sealed:
        assert (folder / name).read_bytes() == (tmp_path / "batch" / name).read_bytes()


def test_readers_in_this_process_and_beside_it_see_what_was_sent_and_no_room(folder: Path) -> None:
    payloads = messages(500)
    with FileChannel.open(folder, PLAIN) as channel, FileChannel.attach(folder) as view:
        rx, beside = channel.rx(), view.rx()
        positions = send_singly(channel, payloads)
        assert (folder / "segment.0").stat().st_size > ROOM_BYTES
        assert rx.recv_many(1000).to_payloads() == payloads
        assert beside.recv_many(1000).to_payloads() == payloads
        assert (rx.try_recv(), beside.try_recv()) == (None, None)
        with FileChannelLog(folder) as log:
            assert log.next_position == channel.stats().write_position
            assert log.read(positions[-1]).to_payloads() == payloads[-1:]
            assert list(log.verify()) == []
        channel.append(b"last")
        assert (rx.recv(timeout=0), beside.recv(timeout=60)) == (b"last", b"last")


def test_a_message_that_comes_between_two_looks_at_the_room_is_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Walk._stuck
    late = [b"late", b"later"]

    def send_then_judge(self: Walk, *seen: Any) -> None:
        while late:
            tx.send(late.pop(0))  # the reader has seen the mark; what it stood for is proven by what is behind it now
        judge(self, *seen)

    with FileChannel.open(folder, PLAIN) as channel, FileChannelLog(folder) as log:
        tx = channel.tx()
        send_singly(channel, messages(500))
        end = log.read(0).next_position
        monkeypatch.setattr(Walk, "_stuck", send_then_judge)
        assert len(log.read(end)) == 0
        assert late == []
        assert log.read(end).to_payloads() == [b"late", b"later"]


def test_batches_and_large_messages_between_single_ones_keep_the_order(folder: Path) -> None:
    expected: list[bytes] = []
    with FileChannel.open(folder, PLAIN) as channel:
        for round_ in range(5):
            small, many, large = messages(100), [b"batch %d" % round_] * 3, b"z" * (100_000 + round_)
            send_singly(channel, small)
            channel.append_many(many)
            send_singly(channel, small)
            channel.append(large)
            expected += [*small, *many, *small, large]
        assert channel.rx().recv_many(10_000).to_payloads() == expected
    with FileChannel.open(folder, PLAIN) as channel:
        assert channel.problems == []
        assert channel.rx().recv_many(10_000).to_payloads() == expected


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_anything_that_is_bytes_is_stored(folder: Path, kind: type) -> None:
    with FileChannel.open(folder, PLAIN) as channel:
        send_singly(channel, [kind(b"abc")] * 100)
        assert channel.rx().recv_many(1000).to_payloads() == [b"abc"] * 100


KILLED = """
import os, sys
from penstock.log.filechannel import FileChannel
with FileChannel.open(sys.argv[1], sync="interval", compression="none") as channel:
    tx = channel.tx()
    for n in range(int(sys.argv[2])):
        tx.send(b"%d " % n + b"x" * (n * 7 % 90))
    os.write(1, b"sent\\n")
    os.read(0, 1)
"""


def test_what_was_stored_survives_a_kill_and_recovery_leaves_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(folder), "5000"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"sent\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    killed = (folder / "segment.0").read_bytes()
    with FileChannel.open(tmp_path / "batch", PLAIN) as other:
        other.append_many(messages(5000))
    whole = (tmp_path / "batch" / "segment.0").read_bytes()
    assert killed.startswith(whole + ROOM_MARK)
    assert not any(killed[len(whole) + 4 :])
    with FileChannelLog(folder) as log:
        assert list(log.verify()) == []
    with FileChannel.open(folder, PLAIN) as channel:
        assert channel.problems == []
    assert (folder / "segment.0").read_bytes() == whole
    assert not list(folder.glob("*.bad"))


def test_the_rule_by_which_the_original_repairs_a_killed_queue_cuts_the_room_and_nothing_else(folder: Path) -> None:
    """The original drops what follows the last frame whose payload is all there and matches its checksum."""
    import zlib

    with FileChannel.open(folder, PLAIN) as channel:
        send_singly(channel, messages(3000))
        end = channel.stats().write_position
        data = (folder / "segment.0").read_bytes()  # as a kill would leave it
    at = 64
    while True:
        length, crc = int.from_bytes(data[at : at + 4], "big"), int.from_bytes(data[at + 4 : at + 8], "big")
        if at + 8 + length > len(data) or zlib.crc32(data[at + 8 : at + 8 + length]) != crc:
            break
        at += 8 + length
    assert at == 64 + end


def test_half_a_message_behind_the_mark_is_cut_and_kept_aside(folder: Path) -> None:
    with FileChannel.open(folder, PLAIN) as channel:
        send_singly(channel, messages(100))
        end = channel.stats().write_position
        shutil.copytree(folder, folder.with_name("killed"))
    segment = folder.with_name("killed") / "segment.0"
    with open(segment, "r+b") as file:
        file.seek(64 + end + 8)
        file.write(b"never published")
    with FileChannel.open(folder.with_name("killed"), PLAIN) as channel:
        assert channel.stats().write_position == end
        assert len(channel.problems) == 1


def test_a_receiver_that_waits_is_woken_by_a_store(folder: Path) -> None:
    with FileChannel.open(folder, PLAIN) as channel:
        send_singly(channel, [b""] * 100)
        rx = channel.rx(start="latest")
        for n in range(200):
            found: list[bytes] = []
            waiting = threading.Thread(target=lambda found=found: found.append(rx.recv(timeout=60)))
            waiting.start()
            channel.append(b"%d" % n)
            waiting.join(60)
            assert found == [b"%d" % n]


def test_stores_become_durable_by_themselves(folder: Path) -> None:
    from penstock.disk import Backoff

    options = ChannelOptions(sync="interval", sync_seconds=0.01, compression="none")
    with FileChannel.open(folder, options) as channel:
        for _ in range(20):
            send_singly(channel, [b"x"] * 100)
            end = channel.stats().write_position
            assert Backoff().wait(lambda end=end: (channel.stats().durable_position or 0) >= end, 60)
        assert channel._spool.room is not None


def test_a_failed_sync_stops_stores_as_well(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileChannel.open(folder, PLAIN) as channel:
        send_singly(channel, [b"x"] * 100)

        def fail(_: object) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("penstock.disk.posix.PosixFile.sync", fail)
        with pytest.raises(ReadOnlyError):
            channel.sync()
        with pytest.raises(ReadOnlyError):
            channel.tx().send(b"y")


def test_threads_share_the_room(folder: Path) -> None:
    with FileChannel.open(folder, ChannelOptions(sync="interval", sync_seconds=0.001, compression="none")) as channel:

        def work(who: int) -> None:
            tx = channel.tx()
            for n in range(2000):
                tx.send(b"%d %d" % (who, n))

        threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = channel.rx().recv_many(100_000).to_payloads()
    assert len(found) == 8000
    for who in range(4):
        own = [payload for payload in found if payload.startswith(b"%d " % who)]
        assert own == [b"%d %d" % (who, n) for n in range(2000)]


def test_a_bound_in_bytes_holds_for_stores(folder: Path) -> None:
    from penstock.errors import Backpressure

    options = ChannelOptions(
        sync="none", compression="none", segment_bytes=LEAST_SEGMENT_BYTES, keep_bytes=2 * LEAST_SEGMENT_BYTES
    )
    with FileChannel.open(folder, options) as channel:
        tx, sent = channel.tx(), 0
        while sent <= 3 * LEAST_SEGMENT_BYTES:
            try:
                tx.send(b"x" * 1000)
            except Backpressure:
                break
            sent += 1008
        assert 2 * LEAST_SEGMENT_BYTES - 2 * ROOM_BYTES < sent <= 2 * LEAST_SEGMENT_BYTES
        assert sum(path.stat().st_size for path in folder.glob("segment.*")) <= 2 * LEAST_SEGMENT_BYTES + ROOM_BYTES


def test_a_child_of_a_fork_stores_nothing(folder: Path) -> None:
    with FileChannel.open(folder, PLAIN) as channel:
        send_singly(channel, [b"x"] * 100)
        tx = channel.tx()
        child = os.fork()
        if not child:
            try:
                tx.send(b"from the child")
            except Exception:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        channel.append(b"y")
        assert channel.rx().recv_many(1000).to_payloads() == [b"x"] * 100 + [b"y"]


def test_few_single_sends_leave_the_file_as_it_is(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "jobs", PLAIN) as channel:
        send_singly(channel, [b"abc"] * SINGLES_BEFORE_ROOM)
        assert (tmp_path / "jobs" / "segment.0").stat().st_size == 64 + 11 * SINGLES_BEFORE_ROOM


def test_only_a_mark_and_zeros_are_room(tmp_path: Path) -> None:
    from penstock.disk import PosixDisk

    for data, expected in (
        (ROOM_MARK, True),
        (ROOM_MARK + bytes(9), True),
        (ROOM_MARK + b"\1", False),
        (b"\xff", False),
    ):
        path = tmp_path / "file"
        path.write_bytes(b"head" + data)
        with PosixDisk().open(str(path)) as file:
            assert is_room(file, 4, 4 + len(data)) is expected


def test_a_cursor_in_memory_is_the_register_that_others_read(tmp_path: Path) -> None:
    from penstock.disk import PosixDisk
    from penstock.log.sidecar import Register

    register, owner = Register(PosixDisk(), str(tmp_path / "cursor")), bytes(range(16))
    assert register.map_slots(owner) is None  # its room is not sure before it was written once
    register.write(owner, 7)
    slots = register.map_slots(owner)
    assert slots is not None
    for position in (8, 1 << 62, 9):
        slots.write(position)
        assert Register(PosixDisk(), str(tmp_path / "cursor")).read() == (owner, position)
    register.close()
    register.write(owner, 10)
    assert register.read() == (owner, 10)


def test_a_tail_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(ROOM_MARK.ljust(4096, b"\0"))
    with open(path, "r+b") as file:
        tail = kernel.tail.Tail(kernel.Mapping(file.fileno(), 0, 4096, True), 0, 1000, 1 << 60, 4000)
    assert tail.append(b"x") == -1  # not armed
    tail.armed = True
    assert (tail.append(b"x" * 4000), tail.append(b"x" * 80), tail.append(b""), tail.end) == (1000, -1, 5008, 5016)
    assert tail.append(b"y" * 5000) == -1
    assert not tail.put(kernel.encode_frame(b"x" * 100))
    assert tail.put(kernel.encode_frame(b"x" * 10))
    with pytest.raises(TypeError):
        tail.append("text")
    assert path.read_bytes()[4016:4034] == kernel.encode_frame(b"x" * 10)
    assert path.read_bytes()[4034:4038] == ROOM_MARK
