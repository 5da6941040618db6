"""cursor.bin is written and judged as the original does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.disk import MemoryDisk, PosixDisk
from penstock.errors import CorruptionError, OptionsError
from penstock.log.messagelog.fifo_cursor import check_cursor, decode_cursor, encode_cursor, load_cursor, save_cursor

VECTORS = Path(__file__).parents[3] / "vectors" / "messagelog" / "cursor"
CASES: list[dict[str, Any]] = [
    case for case in json.loads((VECTORS / "expected.json").read_text())["cases"] if case["file"]
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_cursor_of_the_original_gets_its_verdict(case: dict[str, Any], tmp_path: Path) -> None:
    data = (VECTORS / case["file"]).read_bytes()
    (tmp_path / "cursor.bin").write_bytes(data)
    first, last = case["log_first_seq"], case["log_last_seq"]
    if "next_seq" in case:
        assert load_cursor(PosixDisk(), str(tmp_path), first, last) == case["next_seq"]
        if not any(data[12:]):
            assert encode_cursor(case["next_seq"]) == data
    else:
        with pytest.raises(CorruptionError):
            load_cursor(PosixDisk(), str(tmp_path), first, last)


def test_moving_the_cursor_persists() -> None:
    disk = MemoryDisk()
    save_cursor(disk, ".", 5)
    save_cursor(disk, ".", 6)
    assert load_cursor(disk, ".", 1, 9) == 6
    assert disk.list(".") == ["cursor.bin"]


def test_a_missing_cursor_is_named() -> None:
    with pytest.raises(CorruptionError, match="no cursor"):
        load_cursor(MemoryDisk(), ".", 1, 9)


@pytest.mark.parametrize("number", [0, -1, 1 << 64])
def test_numbers_that_are_none_are_refused(number: int) -> None:
    with pytest.raises(OptionsError):
        encode_cursor(number)


def test_the_five_rules() -> None:
    with pytest.raises(CorruptionError, match="16 bytes"):
        decode_cursor(encode_cursor(8)[:15])
    with pytest.raises(CorruptionError, match="crc32"):
        decode_cursor(b"\1" + encode_cursor(8)[1:])
    with pytest.raises(CorruptionError, match="ends with 8"):
        check_cursor(10, 1, 8)
    with pytest.raises(CorruptionError, match="begins with 5"):
        check_cursor(3, 5, 10)
    check_cursor(6, 9, 5)  # empty: where the log begins does not matter
