"""Several processes send into one queue, a turn each."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from penstock.errors import Backpressure, ClosedError, LockedError, OptionsError, ReplacedError, Timeout
from penstock.log.filechannel import FileChannel, FileChannelLog, shared

OPTIONS = {"sync": "none", "compression": "none"}


def contents(path: Path) -> list[bytes]:
    with FileChannel.attach(path) as view:
        return [payload for batch in view.rx().batches(timeout=0) for payload in batch.to_payloads()]


def test_two_handles_send_in_turns_and_each_sees_what_the_other_sent(tmp_path: Path) -> None:
    path = tmp_path / "jobs"
    with FileChannel.share(path, **OPTIONS) as one, FileChannel.share(path, **OPTIONS) as two:
        assert [one.append(b"a"), two.append(b"b"), one.append(b"c")] == [0, 9, 18]
        assert two.append_many([b"d", b"e"]).tolist() == [27, 36]
        assert one.stats().write_position == two.stats().write_position == 45
        rx = one.rx()
        assert rx.recv_many().to_payloads() == [b"a", b"b", b"c", b"d", b"e"]
        two.append(b"f")
        assert rx.recv(timeout=60) == b"f"


def test_shared_sends_leave_the_bytes_of_a_single_owner(tmp_path: Path) -> None:
    payloads = [b"%d" % n for n in range(300)]
    handles = [FileChannel.share(tmp_path / "shared", segment_bytes=500, **OPTIONS) for _ in range(3)]
    for number, payload in enumerate(payloads):
        handles[number % 3].append(payload)
    for handle in handles:
        handle.close()
    with FileChannel.open(tmp_path / "own", segment_bytes=500, **OPTIONS) as own:
        own.append_many(payloads)
    for segment in sorted((tmp_path / "own").glob("segment.*")):
        assert segment.read_bytes() == (tmp_path / "shared" / segment.name).read_bytes()
    with FileChannelLog(tmp_path / "shared") as log:
        assert list(log.verify()) == []


def test_threads_and_handles_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "jobs"

    def work(who: int) -> None:
        with FileChannel.share(path, segment_bytes=2000, **OPTIONS) as queue:
            for n in range(100):
                queue.append(b"%d %d" % (who, n))

    threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = contents(path)
    for who in range(4):
        assert [p for p in found if p.startswith(b"%d " % who)] == [b"%d %d" % (who, n) for n in range(100)]
    assert len(found) == 400


def test_a_turn_mends_what_a_sender_left_that_died_in_the_middle_of_a_write(tmp_path: Path) -> None:
    path = tmp_path / "jobs"
    with FileChannel.share(path, **OPTIONS) as queue:
        queue.append(b"whole")
        with open(path / "segment.0", "ab") as file:
            file.write(b"\0\0\0\x20half")
        assert queue.append(b"next") == 13
    assert contents(path) == [b"whole", b"next"]


def test_an_owner_and_sharers_take_turns_at_being_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "TURN_SECONDS", 0.05)
    path = tmp_path / "jobs"
    with FileChannel.share(path, **OPTIONS) as queue:
        queue.append(b"a")
        with FileChannel.open(path, **OPTIONS) as owner:
            owner.append_many([b"b"] * 2)
            owner.rotate()
            for _ in range(100):
                owner.append(b"c")
            with pytest.raises(Timeout, match="nothing was sent"):
                queue.append(b"x")
            with pytest.raises(LockedError, match=r"FileChannel\.share"):
                FileChannel.share(path, **OPTIONS)
        queue.append(b"d")
    assert contents(path) == [b"a", b"b", b"b", *[b"c"] * 100, b"d"]


def test_a_shared_queue_collects_what_everyone_has_finished(tmp_path: Path) -> None:
    with FileChannel.share(tmp_path / "jobs", segment_bytes=100, **OPTIONS) as queue:
        group = queue.group("workers")
        queue.append_many([b"x" * 42] * 10)
        group.take_many(10).ack()
        assert queue.gc() == 4
        assert queue.stats().first_position == 400


def test_bounds_hold_whoever_sent(tmp_path: Path) -> None:
    bound = {"segment_bytes": 1000, "keep_bytes": 3000, **OPTIONS}
    with FileChannel.share(tmp_path / "jobs", **bound) as one, FileChannel.share(tmp_path / "jobs", **bound) as two:
        one.append_many([b"x" * 42] * 30)
        with pytest.raises(Backpressure):
            one.append_many([b"x" * 42] * 30)
        one.append_many([b"x" * 42] * 20)
        with pytest.raises(Backpressure):
            two.append_many([b"x" * 42] * 10)


def test_a_replaced_or_closed_queue_is_noticed(tmp_path: Path) -> None:
    import shutil

    path = tmp_path / "jobs"
    queue = FileChannel.share(path, **OPTIONS)
    queue.append(b"a")
    shutil.rmtree(path)
    FileChannel.open(path, **OPTIONS).close()
    with pytest.raises(ReplacedError):
        queue.append(b"b")
    queue.close()
    with pytest.raises(ClosedError):
        queue.append(b"c")
    with pytest.raises(OptionsError, match="flush_seconds"):
        FileChannel.share(path, flush_seconds=0.1)


def test_asyncio_sends_in_turns_as_well(tmp_path: Path) -> None:
    async def send() -> None:
        with FileChannel.share(tmp_path / "jobs", sync="always") as queue:
            tx = queue.tx()
            await asyncio.gather(*(tx.asend(b"%d" % n) for n in range(10)))
            await tx.asend_many([b"x", b"y"])

    asyncio.run(send())
    assert sorted(contents(tmp_path / "jobs")) == sorted([b"%d" % n for n in range(10)] + [b"x", b"y"])
