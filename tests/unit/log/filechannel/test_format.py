"""The golden bytes of the format, and its names."""

from __future__ import annotations

import pytest

from penstock import kernel
from penstock.errors import CorruptionError
from penstock.log.filechannel.format import Header, segment_index


def test_a_frame_on_disk_is_the_one_drawn_in_format() -> None:
    assert kernel.encode_frame(b"Hello world!").hex(" ") == (
        "00 00 00 0c 1b 85 19 95 48 65 6c 6c 6f 20 77 6f 72 6c 64 21"
    )
    assert kernel.encode_frame(b"") == bytes(8)
    assert kernel.encode_frame(bytearray(b"\1")).hex(" ") == "00 00 00 01 a5 05 df 1b 01"
    assert kernel.encode_frame(memoryview(b"\1\2\3")).hex(" ") == "00 00 00 03 55 bc 80 1d 01 02 03"


def test_headers_on_disk_are_the_ones_drawn_in_format() -> None:
    assert Header(0, 0).encode() == bytes(64)
    assert Header(3, 3003).encode() == bytes.fromhex("000000030000000000000bbb") + bytes(52)
    packed = Header(3, 3003, 5000, "gzip")
    assert packed.encode() == bytes.fromhex("000000030000000000000bbb000000000000138801") + bytes(43)
    assert Header.decode("x", packed.encode(), packed=True) == packed


def test_bytes_21_to_63_of_a_plain_header_are_carried_over() -> None:
    assert Header(3, 3003, 5000, "snappy").encode(b"\7" * 43)[21:] == b"\7" * 43


@pytest.mark.parametrize("name", ["segment.007", "segment.00", "segment.x", "segment.1.bak", "segment.4294967296",
                                  "segment.", "segment.1.z.tmp", "notes.txt", "lock", "segment.१"])  # fmt: skip
def test_other_names_are_no_segments(name: str) -> None:
    assert segment_index(name) is None


@pytest.mark.parametrize(
    ("data", "byte"),
    [(b"", 0), (bytes(63), 63), (b"\0" * 20 + b"\7" + bytes(43), 20), (bytes(4) + b"\xff" * 8 + bytes(52), 12)],
)
def test_what_is_no_header_is_refused_by_its_byte(data: bytes, byte: int) -> None:
    with pytest.raises(CorruptionError) as caught:
        Header.decode("segment.1.z", data, packed=True)
    assert caught.value.byte == byte
