"""Promise: the bytes are the ones drawn in format.py and docs/formats/xchannel.md."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from penstock.errors import CorruptionError, OptionsError, UnsupportedError
from penstock.kernel.twin import xchannel as twin
from penstock.log.xchannel import Writer
from penstock.log.xchannel.format import (
    MAX_SEQUENCE,
    PRISTINE,
    ChannelHeader,
    RecordStop,
    file_path,
    file_sequence,
    footprint,
    position_of,
    split_position,
)


def rows(path: Path, start: int, stop: int) -> str:
    return path.read_bytes()[start:stop].hex(" ")


def test_a_fresh_file_is_the_one_drawn(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    Writer.precreate(path, region_bytes=4096)
    assert rows(path, 0, 16) == "01 00 00 00 40 00 00 00 00 00 00 00 00 00 00 00"
    assert rows(path, 16, 32) == "60 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00"
    assert rows(path, 32, 48) == "00 00 00 00 00 00 00 00 00 10 00 00 00 00 00 00"
    assert rows(path, 48, 80) == " ".join(["00"] * 32)
    assert rows(path, 80, 96) == "00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00"
    assert path.stat().st_size == 4096


def test_the_worked_example_of_the_format_page(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"hello world", kind=1, timestamp_ns=0x1122334455667788)
        assert rows(path, 16, 32) == "80 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00"
        assert rows(path, 80, 96) == "01 01 01 00 0b 00 00 00 88 77 66 55 44 33 22 11"
        assert rows(path, 96, 112) == "68 65 6c 6c 6f 20 77 6f 72 6c 64 00 00 00 00 00"
        assert rows(path, 112, 128) == "00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00"

        writer.append(bytes(4000), kind=1, timestamp_ns=0)
        assert rows(path, 112, 128) == "01 02 00 00 80 0f 00 00 00 00 00 00 00 00 00 00"
        assert rows(path, 4096, 4104) == "01 01 01 00 a0 0f 00 00"
        assert rows(path, 8112, 8128) == PRISTINE.hex(" ")
        assert struct.unpack("<QQ", path.read_bytes()[16:32]) == (8128, 4)
        assert path.stat().st_size == 8192

        writer.roll()
        data = path.read_bytes()
        assert data[8112:8120].hex(" ") == "01 03 00 00 00 00 00 00"
        assert struct.unpack("<QQ", data[16:32]) == (8144, 4)
        fresh = (tmp_path / "chan.1").read_bytes()
        assert fresh[:96] == ChannelHeader.fresh(1, 4096, 0).encode()


def test_the_page_of_the_format_shows_the_same_bytes() -> None:
    page = (Path(__file__).parents[4] / "docs" / "formats" / "xchannel.md").read_text()
    for line in (
        "01 00 00 00 40 00 00 00 00 00 00 00 00 00 00 00",
        "60 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00",
        "01 01 01 00 0b 00 00 00 88 77 66 55 44 33 22 11",
        "01 02 00 00 80 0f 00 00 00 00 00 00 00 00 00 00",
    ):
        assert line in page


def test_the_largest_message_is_kept_as_its_low_32_bits(tmp_path: Path) -> None:
    Writer.precreate(tmp_path / "chan", region_bytes=4096, max_message_bytes=(1 << 32) + 5)
    assert ChannelHeader.decode("chan", (tmp_path / "chan").read_bytes()).max_message_bytes == 5


def test_a_header_survives_encoding() -> None:
    header = ChannelHeader(96, 1, 7, 8192, 100)
    assert ChannelHeader.decode("f", header.encode()) == header


@pytest.mark.parametrize(
    ("length", "at", "version"),
    [(64, 48, 1), (128, 56, 2), (128, 56, 3), (192, 56, 4)],
)
def test_newer_formats_are_refused_by_name(length: int, at: int, version: int) -> None:
    data = bytearray(ChannelHeader.fresh(0, 4096, 0).encode().ljust(256, b"\0"))
    struct.pack_into("<I", data, 4, length)
    struct.pack_into("<H", data, at, version)
    with pytest.raises(UnsupportedError, match=f"chan: xchannel format v{version} "):
        ChannelHeader.decode("chan", bytes(data))


@pytest.mark.parametrize("size", [0, 1, 79])
def test_a_short_file_is_corrupt_and_not_an_exception_of_struct(size: int) -> None:
    with pytest.raises(CorruptionError):
        ChannelHeader.decode("chan", ChannelHeader.fresh(0, 4096, 0).encode()[:size])


def test_a_footprint_counts_header_and_padding() -> None:
    assert [footprint(n) for n in (0, 1, 8, 9)] == [16, 24, 24, 32]


def test_positions_split_into_what_they_were_made_of() -> None:
    for sequence, offset in ((0, 0), (1, 80), (MAX_SEQUENCE, (1 << 40) - 8)):
        assert split_position(position_of(sequence, offset)) == (sequence, offset)
        assert position_of(sequence, offset) < 1 << 63
    for wrong in (-1, 1 << 63):
        with pytest.raises(OptionsError, match="must be between"):
            split_position(wrong)


def test_only_canonical_names_are_files_of_the_channel() -> None:
    names = (
        "a",
        "a.0",
        "a.1",
        "a.10",
        "a.01",
        "a.+1",
        "a.-1",
        "a.1.bak",
        "a.tmp",
        "ax.1",
        "a.",
        "a.²",
        "a.penstock-id",
    )
    assert {name: file_sequence("a", name) for name in names if file_sequence("a", name) is not None} == {
        "a": 0, "a.1": 1, "a.10": 10,
    }  # fmt: skip
    assert [file_path("d/a", n) for n in (0, 3)] == ["d/a", "d/a.3"]


def test_the_reasons_to_stop_have_the_numbers_of_the_kernel() -> None:
    assert {stop.name: stop.value for stop in RecordStop} == {
        name: getattr(twin, name) for name in RecordStop.__members__
    }
