"""Readers that go on where the last one of their name had acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import LockedError, OptionsError
from penstock.log import open_log
from penstock.log.xchannel import Reader, Writer


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Path]:
    with Writer.open(tmp_path / "ticks", region_bytes=4096, roll_bytes=8192) as writer:
        writer.append_many([b"%d" % n for n in range(10)])
        yield tmp_path / "ticks"


def test_a_named_reader_goes_on_at_its_first_unacknowledged_record(channel: Path) -> None:
    with Reader.open(channel, name="billing") as reader:
        assert reader.read_batch(3).to_payloads() == [b"0", b"1", b"2"]
        reader.ack()
        reader.read()  # and it is not done
    with Reader.open(channel, "latest", name="billing") as reader:
        assert bytes(reader.read().payload) == b"3"


def test_an_ack_by_position_keeps_the_rest(channel: Path) -> None:
    with Reader.open(channel, name="billing") as reader:
        batch = reader.read_batch(5)
        reader.ack(int(batch.positions[1]), sync=True)
    with Reader.open(channel, name="billing") as reader:
        assert bytes(reader.read().payload) == b"1"
    with open_log(str(channel)) as log:
        assert list(log.stat()["cursors"]) == ["billing"]


def test_a_new_name_starts_where_it_is_told(channel: Path) -> None:
    with Reader.open(channel, "latest", name="late") as reader:
        assert reader.try_read() is None
        reader.ack()
    with Reader.open(channel, name="late") as reader:
        assert reader.try_read() is None


def test_one_reader_has_a_name_at_a_time(channel: Path) -> None:
    with Reader.open(channel, name="billing"):
        with pytest.raises(LockedError, match="billing"):
            Reader.open(channel, name="billing")
        Reader.open(channel, name="other").close()
    Reader.open(channel, name="billing").close()


def test_a_reader_without_a_name_has_nothing_to_acknowledge(channel: Path) -> None:
    with Reader.open(channel) as reader, pytest.raises(OptionsError, match="name"):
        reader.ack()
    with pytest.raises(OptionsError, match="cursor name"):
        Reader.open(channel, name="no/name")


def test_a_name_whose_files_are_gone_goes_on_at_the_oldest(tmp_path: Path) -> None:
    base = tmp_path / "ticks"
    with Writer.open(base, region_bytes=4096, roll_bytes=8192, keep_files=2) as writer:
        writer.append(b"first")
        with Reader.open(base, name="slow") as reader:
            reader.ack()
        for _ in range(100):
            writer.append(b"x" * 1000)
        with Reader.open(base, name="slow") as reader:
            assert bytes(reader.read().payload) == b"x" * 1000
