"""The loads of the original's own tests, at their own sizes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.errors import Timeout
from penstock.log.filechannel import ChannelOptions, FileChannel

LOAD = [bytes([n % 256]) * 128 for n in range(81_920)]
"""10 MiB: with a threshold of 1 MiB there are 7,711 messages in a segment, and segments 0 to 10."""
LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def options(compression: str = "snappy") -> ChannelOptions:
    return ChannelOptions(sync="none", segment_bytes=1 << 20, compression=compression)  # type: ignore[arg-type]


def names(path: Path) -> list[str]:
    found = (name for name in os.listdir(path) if name.startswith("segment."))
    return sorted(found, key=lambda name: int(name.split(".")[1]))


def drain(rx: object) -> list[bytes]:
    return [p for batch in rx.batches(timeout=0) for p in batch.to_payloads()]  # type: ignore[attr-defined]


def strings(count: int, longest: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    letters = rng.randbytes(1 << 16).translate(bytes(LETTERS[n % len(LETTERS)] for n in range(256)))
    starts = [(rng.randrange(1 << 15), rng.randrange(longest + 1)) for _ in range(count)]
    return [letters[start : start + length] for start, length in starts]


@pytest.mark.parametrize("compression", ["snappy", "gzip"])
def test_ten_mebibytes_are_read_from_compressed_segments(tmp_path: Path, compression: str) -> None:
    with FileChannel.open(tmp_path / "c", options(compression)) as channel:
        positions = channel.append_many(LOAD)
        early = channel.rx()
        channel.compact()
        late = channel.rx()
        assert names(tmp_path / "c") == [*(f"segment.{n}.z" for n in range(9)), "segment.9", "segment.10"]
        assert channel.folder.begin(1) == 7711 * 136 == positions[7711]
        assert drain(early) == LOAD
        assert drain(late) == LOAD


def test_ten_mebibytes_that_were_read_leave_a_segment_and_the_lock(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", options()) as channel:
        channel.append_many(LOAD)
        with channel.rx() as rx:
            assert len(drain(rx)) == len(LOAD)
    left = [name for name in os.listdir(tmp_path / "c") if not name.startswith("penstock-")]
    assert sorted(left) == ["lock", "segment.10"]  # also of what was being compressed when it was collected


def test_ten_mebibytes_without_an_ack_are_there_after_a_restart(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "c", options()) as channel:
        channel.append_many(LOAD)
        with channel.ack_rx() as rx:
            assert len(drain(rx)) == len(LOAD)
        assert names(tmp_path / "c")[0].startswith("segment.0")
    with FileChannel.open(tmp_path / "c", options()) as channel:
        assert drain(channel.ack_rx()) == LOAD


def test_random_strings_arrive_and_then_nothing(tmp_path: Path) -> None:
    sent = strings(32_768, 511, seed=1)
    with FileChannel.open(tmp_path / "c", ChannelOptions(sync="none")) as channel:
        tx, rx = channel.tx(), channel.rx()
        for payload in sent:
            tx.send(payload)
        assert [rx.recv(timeout=1) for _ in sent] == sent
        with pytest.raises(Timeout):
            rx.recv(timeout=0.001)


def test_a_million_random_strings_through_small_segments(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    count = 1_048_576 if request.config.getoption("--long") else 100_000
    sent = strings(count, 511, seed=2)
    with FileChannel.open(tmp_path / "c", ChannelOptions(sync="none", segment_bytes=10 << 20)) as channel:
        rx, found = channel.rx(), 0
        for start in range(0, count, 10_000):
            channel.append_many(sent[start : start + 10_000])
        for batch in rx.batches(timeout=0):
            assert batch.to_payloads() == sent[found : found + len(batch)]
            found += len(batch)
    assert found == count


@pytest.mark.parametrize("longest", [127, 63])
def test_four_at_once_each_see_all_the_random_strings(tmp_path: Path, longest: int) -> None:
    sent = strings(32_768, longest, seed=longest)
    with FileChannel.open(tmp_path / "c", ChannelOptions(sync="none")) as channel:
        found: dict[int, list[bytes]] = {}
        receivers = [channel.rx() for _ in range(4)]

        def follow(number: int) -> None:
            found[number] = [receivers[number].recv(timeout=60) for _ in sent]

        threads = [threading.Thread(target=follow, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for start in range(0, len(sent), 64):
            channel.append_many(sent[start : start + 64])
        for thread in threads:
            thread.join(60)
    assert all(found[number] == sent for number in range(4))


MEMORY = """
import resource, sys
from penstock.log.filechannel import ChannelOptions, FileChannel
def most(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
with FileChannel.open(sys.argv[1], ChannelOptions(sync="none")) as channel:
    tx, rx, batch = channel.tx(), channel.rx(), [b"Hello world!"] * 8192
    tx.send_many(batch)
    assert rx.recv() == batch[0]
    before = most()
    for _ in range(255):
        tx.send_many(batch)
    sent = most()
    left = 256 * 8192 - 1
    while left:
        if left % 2:
            assert rx.recv() == batch[0]
            left -= 1
        else:
            left -= len(rx.recv_many(10_000))
print(before, sent, most())
"""


def test_memory_stays_flat_over_two_million_messages(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "c")], capture_output=True, text=True, check=True
    )
    before, sent, received = map(int, done.stdout.split())
    assert sent - before < 16  # MiB; the messages with their frames are 40
    assert received - before < 16
