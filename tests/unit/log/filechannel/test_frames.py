"""Frames made a part at a time are the frames made at once, and a long batch goes whole or not at all."""

from __future__ import annotations

import errno
import itertools
import random
import struct
import zlib

import numpy as np
import pyarrow as pa
import pytest

from penstock.batch import Batch
from penstock.disk import MemoryDisk
from penstock.errors import OptionsError
from penstock.log.filechannel import ChannelOptions, FileChannel, spool
from penstock.log.filechannel.frames import Frames
from penstock.testing.faulty import FaultyDisk

PAYLOADS = [random.Random(n).randbytes(n * 37 % 500) for n in range(120)]
EXPECTED = b"".join(struct.pack(">II", len(p), zlib.crc32(p)) + p for p in PAYLOADS)


@pytest.mark.parametrize("chunk", [1, 100, 1000, 1 << 20])
@pytest.mark.parametrize(
    "given",
    [
        PAYLOADS,
        [bytearray(p) for p in PAYLOADS],
        tuple(PAYLOADS),
        Batch.of(PAYLOADS),
        Batch.of([b"skipped", *PAYLOADS])[1:],
        pa.array(PAYLOADS, pa.binary()),
    ],
    ids=["list", "other bytes", "tuple", "batch", "slice", "arrow"],
)
def test_parts_are_the_frames_of_everything(given: object, chunk: int) -> None:
    frames = Frames(given, chunk)
    assert frames.ends.tolist() == np.cumsum([8 + len(p) for p in PAYLOADS]).tolist()
    cuts = [0, 1, 40, 119, 120]
    parts = [part for a, b in itertools.pairwise(cuts) for part in frames.parts(a, b)]
    assert b"".join(parts) == EXPECTED
    if chunk == 1000:
        assert max(map(len, parts)) <= 1000


def test_a_list_that_changes_meanwhile_is_sent_as_it_was() -> None:
    given = list(PAYLOADS)
    frames = Frames(given, 1000)
    given.clear()
    assert b"".join(frames.parts(0, 120)) == EXPECTED


def test_spans_outside_their_buffer_are_refused_before_anything_is_sent() -> None:
    batch = Batch.of([b"x" * 100] * 50)
    batch.payloads.lengths[49] = 10_000
    with FileChannel.open("c", ChannelOptions(sync="none"), disk=MemoryDisk()) as channel:
        with pytest.raises(ValueError, match="outside"):
            channel.append_many(batch)
        assert channel.stats().write_position == 0


@pytest.mark.parametrize("segment_bytes", [7000, 1 << 20])
def test_a_long_batch_leaves_the_bytes_of_single_sends(monkeypatch: pytest.MonkeyPatch, segment_bytes: int) -> None:
    monkeypatch.setattr(spool, "CHUNK_BYTES", 1500)
    one, many = MemoryDisk(), MemoryDisk()
    options = ChannelOptions(sync="none", compression="none", segment_bytes=segment_bytes)
    with FileChannel.open("c", options, disk=one) as channel:
        alone = [channel.append(payload) for payload in PAYLOADS]
    with FileChannel.open("c", options, disk=many) as channel:
        assert channel.append_many(PAYLOADS).tolist() == alone
    names = [name for name in one.list("c") if name.startswith("segment.")]
    assert names == [name for name in many.list("c") if name.startswith("segment.")]
    for name in names:
        with one.open(f"c/{name}") as mine, many.open(f"c/{name}") as theirs:
            assert mine.read_at(0, 1 << 20) == theirs.read_at(0, 1 << 20)


@pytest.mark.parametrize("fails", [1, 3, 7])
def test_a_long_batch_that_meets_a_full_disk_leaves_nothing_of_its_segment(
    monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    monkeypatch.setattr(spool, "CHUNK_BYTES", 1500)
    disk = FaultyDisk(MemoryDisk())
    options = ChannelOptions(sync="none", compression="none")
    channel = FileChannel.open("c", options, disk=disk)
    channel.append(b"before")
    disk.fail("write_at", OSError(errno.ENOSPC, "No space left on device"), path="c/segment", after=fails - 1)
    with pytest.raises(OSError, match="No space left"):
        channel.append_many(PAYLOADS)
    assert channel.stats().write_position == channel.stats().visible_position == 14
    assert channel.stats().error is None
    with FileChannel.attach("c", disk=disk) as view:
        assert view.rx().recv_many().to_payloads() == [b"before"]
    channel.close()
    with FileChannel.open("c", options, disk=disk) as channel:
        assert channel.problems == []


def test_a_message_that_no_frame_holds_is_refused_with_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.kernel.twin import filechannel as twin

    monkeypatch.setattr(twin, "LARGEST", 10)
    with pytest.raises(OptionsError, match="too large"):
        twin.frame_ends([b"x", b"y" * 11], np.empty(2, np.int64))
