"""Promise: a sync of a channel that failed is told and never forgotten, and the mark names only what is synced."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.disk import PosixDisk
from penstock.errors import ReadOnlyError, ReplacedError
from penstock.log.xchannel import Reader, Writer
from penstock.testing.faulty import FaultyDisk


def contents(path: Path) -> list[bytes]:
    with Reader.open(path) as reader:
        return [bytes(record.payload) for record in reader.records(timeout=0)]


def test_a_failed_sync_is_never_forgotten(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    writer = Writer.open(tmp_path / "chan", region_bytes=4096, disk=disk)
    writer.append(b"a")
    safe = writer.sync()
    writer.append(b"b")
    disk.fail("sync", OSError(errno.EIO, "Input/output error"), path="chan")
    with pytest.raises(OSError, match="Input/output error"):
        writer.sync()
    with pytest.raises(ReadOnlyError, match="an earlier sync failed"):
        writer.sync()
    assert writer.durable_position == safe  # the mark does not pass what nobody knows
    with pytest.raises(ReadOnlyError):
        writer.close()
    with Writer.open(tmp_path / "chan", disk=disk) as again:
        again.append(b"c")
    assert contents(tmp_path / "chan") == [b"a", b"b", b"c"]


def test_a_failed_sync_in_the_background_is_told_by_the_next_append(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    writer = Writer.open(tmp_path / "chan", sync="interval", sync_seconds=0.001, disk=disk)
    disk.fail("sync", OSError(errno.EIO, "Input/output error"), path="chan")
    kept = 0
    with pytest.raises(ReadOnlyError, match="Input/output"):  # noqa: PT012 - it comes when it comes
        for _ in range(1_000_000):
            writer.append(b"x")
            kept += 1
    with pytest.raises(ReadOnlyError):
        writer.append_many([b"y"])
    with pytest.raises(ReadOnlyError):
        writer.sync()
    with pytest.raises(ReadOnlyError):
        writer.close()
    assert len(contents(tmp_path / "chan")) == kept  # what was told to have failed is not there
    Writer.open(tmp_path / "chan", disk=disk).close()


@pytest.mark.parametrize("operation", ["create", "write_at", "modify", "sync_folder"])
@pytest.mark.parametrize("sync", ["none", "interval", "always"])
def test_a_sync_that_had_no_room_or_no_descriptor_is_tried_again(sync: Any, operation: str, tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    writer = Writer.open(tmp_path / "chan", sync=sync, sync_seconds=0.001, disk=disk)
    for _ in range(3):
        disk.fail(operation, OSError(errno.ENOSPC, "No space left on device"))
        with contextlib.suppress(OSError):
            writer.append(b"x")
        with contextlib.suppress(OSError):
            writer.sync()
    while disk._faults:  # those that nobody met yet
        with contextlib.suppress(OSError):
            writer.roll()
            writer.sync()
    position = writer.append(b"last")
    assert writer.sync() > position
    assert (writer.durable_position or 0) > position
    writer.close()
    assert contents(tmp_path / "chan")[-1] == b"last"


def test_a_folder_that_is_moved_away_is_an_error_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    writer = Writer.open(tmp_path / "here" / "chan", sync="always")
    writer.append(b"x")
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises((OSError, ReplacedError), match="chan"):
        writer.append(b"y")
    with pytest.raises((OSError, ReplacedError), match="chan"):
        writer.close()
    with Writer.open(tmp_path / "there" / "chan") as again:
        again.append(b"z")


@pytest.mark.parametrize("sync", ["interval", "always"])
def test_a_sync_mode_moves_the_mark_by_itself(sync: Any, tmp_path: Path) -> None:
    with Writer.open(tmp_path / "chan", sync=sync, sync_seconds=0.01) as writer:
        position = writer.append(b"x")
        for _ in range(500):
            if (writer.durable_position or 0) > position:
                break
            assert sync == "interval"
            threading.Event().wait(0.01)
        assert (writer.durable_position or 0) > position


def test_files_that_were_rolled_are_synced_before_the_mark_names_the_next(tmp_path: Path) -> None:
    disk = FaultyDisk(PosixDisk())
    with Writer.open(tmp_path / "chan", region_bytes=4096, disk=disk) as writer:
        writer.append(b"a")
        writer.roll()
        writer.append(b"b")
        writer.roll()
        disk.calls.clear()
        writer.sync()
        synced = [os.path.basename(path) for operation, path in disk.calls if operation == "sync"]
    assert synced[:3] == ["chan", "chan.1", "chan.2"]
    assert synced[-1] == "chan.penstock-mark"
