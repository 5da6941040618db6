"""Reading many records at once.  Numbers in comments are those of the original's own suites (facts 6)."""

from __future__ import annotations

from pathlib import Path

import pytest
from xchannels import taken

from penstock.errors import (
    CorruptionError,
    OptionsError,
)
from penstock.log.xchannel import Reader, Writer


def test_a_batch_holds_user_records_only_and_the_next_is_empty(path: Path) -> None:  # 5
    with Writer.open(path, region_bytes=4096) as writer, Reader.open(path) as reader:
        writer.append_many([b"one", b"two"])
        assert reader.read_batch().to_payloads() == [b"one", b"two"]
        assert len(reader.read_batch()) == 0


def test_a_batch_spans_regions(path: Path) -> None:  # 6
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append_many([b"x" * 3000, b"y" * 3000, b"z" * 3000])
    with Reader.open(path) as reader:
        batch = reader.read_batch()
        assert [payload[:1] for payload in batch.to_payloads()] == [b"x", b"y", b"z"]
        assert batch.positions.tolist() == [80, 4096, 8192]


def test_batches_follow_files(path: Path) -> None:  # 7, 87
    with Writer.open(path, region_bytes=4096) as writer, Reader.open(path) as reader:
        for number in range(3):
            writer.append_many([b"%d" % number] * 2)
            writer.roll()
        found = []
        while len(batch := reader.read_batch()):
            found += list(zip(batch.positions.tolist(), batch.to_payloads(), strict=True))
        assert found == [((n << 40) + 80 + 24 * k, b"%d" % n) for n in range(3) for k in range(2)]


def test_an_empty_batch_leaves_a_live_reader_where_it_was(path: Path) -> None:  # 8
    with Writer.open(path) as writer, Reader.open(path, "latest") as reader:
        before = reader.position
        assert len(reader.read_batch()) == 0
        assert reader.position == before
        writer.append(b"x")
        assert reader.read_batch().positions.tolist() == [before]


def test_a_late_joiner_of_an_empty_channel_stands_on_the_first_slot(path: Path) -> None:  # 9
    Writer.precreate(path)
    with Reader.open(path) as reader:
        assert len(reader.read_batch()) == 0
        assert reader.position == 80


def test_a_batch_obeys_its_limit_and_goes_on(path: Path) -> None:  # 60, 61
    with Writer.open(path) as writer, Reader.open(path) as reader:
        writer.append_many([b"%d" % n for n in range(10)])
        assert reader.read_batch(4).to_payloads() == [b"0", b"1", b"2", b"3"]
        assert taken(reader) == b"4"  # 65: one cursor for both ways of reading
        assert len(reader.read_batch(100)) == 5
        writer.append(b"more")
        assert reader.read_batch().to_payloads() == [b"more"]
        with pytest.raises(OptionsError, match="limit=0"):
            reader.read_batch(0)


def test_records_come_before_the_roll_that_cannot_be_followed(path: Path) -> None:  # 20, 85
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append_many([b"one", b"two"])
        writer.roll()
        writer.append(b"three")
    away = path.with_name("away")
    path.with_name("chan.1").rename(away)
    for read in ("batch", "single"):
        with Reader.open(path) as reader:
            if read == "batch":
                assert reader.read_batch().to_payloads() == [b"one", b"two"]
            else:
                assert [taken(reader), taken(reader)] == [b"one", b"two"]
            for _ in range(3):
                with pytest.raises(CorruptionError, match=r"chan\.1 at byte 0: missing"):
                    reader.read_batch() if read == "batch" else reader.try_read()
            away.rename(path.with_name("chan.1"))
            assert taken(reader) == b"three"
            path.with_name("chan.1").rename(away)


@pytest.mark.parametrize("limit", [1, 7, 64, 100_000])
def test_a_batch_that_is_kept_does_not_change_when_more_is_read(limit: int, path: Path) -> None:
    """Readers use the room of a batch that was not filled up again: never while someone has the batch."""
    sent: list[tuple[int, int, int, bytes]] = []
    kept = []
    with Writer.open(path, region_bytes=4096) as writer, Reader.open(path) as reader:
        for turn in range(40):
            payloads = [b"%d %d" % (turn, number) for number in range(turn % 9)]
            positions = writer.append_many(payloads, kind=turn, timestamp_ns=turn * 1000)
            sent += [(int(p), turn * 1000, turn, payload) for p, payload in zip(positions, payloads, strict=True)]
            kept.append(reader.read_batch(limit))
        while len(batch := reader.read_batch(limit)):
            kept.append(batch)
        found = [(r.position, r.timestamp_ns, r.kind, bytes(r.payload)) for batch in kept for r in batch]
    assert found == sent
    assert [batch.next_position for batch in kept] == sorted(batch.next_position for batch in kept)


def test_the_columns_of_a_short_batch_hold_no_more_than_its_records(path: Path) -> None:
    with Writer.open(path) as writer, Reader.open(path) as reader:
        for _ in range(3):
            writer.append(b"x")
            batch = reader.read_batch()
            owner = batch.positions
            while owner.base is not None:
                owner = owner.base
            assert owner.nbytes < 100


def test_single_reads_and_batches_share_one_cursor(path: Path) -> None:  # 62, 65
    with Writer.open(path, region_bytes=4096) as writer, Reader.open(path) as reader:
        writer.append_many([b"%d" % number for number in range(6)])
        assert taken(reader) == b"0"
        assert reader.read_batch(2).to_payloads() == [b"1", b"2"]
        assert reader.wait(0)
        assert bytes(reader.read(timeout=1).payload) == b"3"
        assert reader.read_batch().to_payloads() == [b"4", b"5"]
        assert reader.try_read() is None
