"""Promise: the bytes drawn in store/pgss.py and docs/formats/pgss.md are the ones written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.disk import MemoryDisk
from penstock.errors import CorruptionError, UnsupportedError
from penstock.store import AppendLogStore, SnapshotWriter, load
from penstock.store.pgss import check_header, cursor_record, encode_updates
from penstock.types import KvUpdate, WatchCursor

PAGE = Path(__file__).parents[3] / "docs" / "formats" / "pgss.md"


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (KvUpdate.put("a", b"x", 1), "709a6440 01 0100 61 01000000 78 08 0000000000000001"),
        (KvUpdate.delete("a", 2), "dc137e9f 02 0100 61 08 0000000000000002"),
        (KvUpdate.purge("a", 2), "dc137e9f 02 0100 61 08 0000000000000002"),
        (KvUpdate.delete("a"), "fe99b878 02 0100 61 00"),
    ],
)
def test_a_record_on_disk_is_the_one_drawn(update: KvUpdate, expected: str) -> None:
    assert encode_updates("log", [update]) == bytes.fromhex(expected)


def test_cursor_records_are_the_ones_drawn() -> None:
    assert cursor_record((1).to_bytes(8, "big")).hex() == "fb4162c403080000000000000001"
    assert cursor_record(b"").hex() == "3c41f46a0300"


def test_the_worked_example_of_the_format_page_is_what_a_store_writes() -> None:
    block = next(part for part in PAGE.read_text().split("```") if "put a = 1 at 1" in part)
    lines = [re.match(r"(?:[0-9a-f]{2} )+", line + " ") for line in block.strip().splitlines()]
    expected = bytes.fromhex("".join(found.group() for found in lines if found))
    disk = MemoryDisk()
    with AppendLogStore.open("fold.snap", disk=disk) as store:
        store.apply([KvUpdate.put(key, b"%d" % n, n) for n, key in ((3, "c"), (1, "a"), (2, "b"))], WatchCursor.of(3))
        assert store.write_data("artifact") == WatchCursor.of(3)
    assert disk.open("artifact/data/fold.snap").read_at(0, 999) == expected
    assert len(expected) == 86


def test_what_is_no_log_is_refused_by_what_it_is() -> None:
    with pytest.raises(CorruptionError, match="too short"):
        check_header("log", b"PGSS")
    with pytest.raises(CorruptionError, match="bad magic"):
        check_header("log", b"PGST\x02\x00")
    with pytest.raises(UnsupportedError, match="version 3"):
        check_header("log", b"PGSS\x03\x00")


def test_stale_keys_are_those_that_are_no_longer_there() -> None:
    disk = MemoryDisk()
    with SnapshotWriter.open("fold.snap", disk=disk) as writer:
        for key in ("a", "b", "c"):
            writer.write_update(KvUpdate.put(key, b"1"))
        writer.checkpoint(WatchCursor.of(1))
    snapshot = load("fold.snap", disk=disk)
    assert snapshot is not None
    assert snapshot.stale_keys(["b", "x"]) == {"a", "c"}
