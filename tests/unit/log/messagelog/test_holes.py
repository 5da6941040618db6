"""Promise: what a log or its index claims by being a hole of a terabyte costs neither memory nor time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock import kernel
from penstock.disk import PosixDisk
from penstock.log import open_log
from penstock.log.messagelog import resync
from penstock.log.messagelog.format import INDEX_ENTRY
from penstock.log.messagelog.segment import INDEX_PIECE, read_index

TERABYTE = 1 << 40


def test_an_index_is_read_as_far_as_it_is_used(tmp_path: Path) -> None:
    used = b"".join((n + 1).to_bytes(4, "little") + (n * 4096).to_bytes(8, "little") for n in range(100_000))
    (tmp_path / "index").write_bytes(used)
    os.truncate(tmp_path / "index", TERABYTE)
    with PosixDisk().open(str(tmp_path / "index")) as file:
        found = read_index(file, TERABYTE)
        assert found.rstrip(b"\0") == used.rstrip(b"\0")
        assert len(found) <= len(used) + INDEX_PIECE
        assert read_index(file, 5 * INDEX_ENTRY.itemsize) == used[: 5 * INDEX_ENTRY.itemsize]


def test_a_segment_that_is_a_hole_is_searched_as_far_as_was_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resync, "SEARCH_BYTES", 1 << 20)
    (tmp_path / "00000000000000000001.log").write_bytes(kernel.messagelog.encode_one(1, 0, b"", b"one"))
    os.truncate(tmp_path / "00000000000000000001.log", TERABYTE)
    (tmp_path / "00000000000000000050.log").write_bytes(kernel.messagelog.encode_one(50, 0, b"", b"fifty"))
    with open_log(tmp_path) as log:
        problems = list(log.verify())
    assert any("2 to 49 are missing" in problem.reason for problem in problems)
