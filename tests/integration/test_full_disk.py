"""Promise: on a full device whatever writes answers, loses nothing it acknowledged, and goes on when there is room.

A small tmpfs is the device; it needs the right to mount one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.artifact import export_store
from penstock.disk import object_store_for
from penstock.errors import PenstockError, ReadOnlyError
from penstock.log.detect import open_log
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer
from penstock.ship import Shipper
from penstock.store import AppendLogOptions, AppendLogStore, LmdbStore, RocksStore
from penstock.store.options import RocksOptions
from penstock.types import KvUpdate, WatchCursor

PAYLOAD = b"y" * 3000


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "device"
    where.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(where)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], capture_output=True, check=True)


def fill(device: Path) -> None:
    with (device / "ballast").open("ab", buffering=0) as file:
        for size in (1 << 16, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def logged(path: Path) -> int:
    with open_log(str(path)) as log:
        position, found = log.first_position, 0
        while len(batch := log.read(position)):
            found, position = found + len(batch), batch.next_position
        return found


def counted(kind: Any) -> Callable[[Path], int]:
    def count(path: Path) -> int:
        with kind.open(path, read_only=True) as store:
            return int(store.count())

    return count


def append(log: Any, number: int) -> None:
    log.append(PAYLOAD)


def apply(store: Any, number: int) -> None:
    store.apply([KvUpdate.put(f"k{number}", PAYLOAD, number)], WatchCursor.of(number))


KINDS: dict[str, tuple[Callable[[Path, Any], Any], Callable[[Any, int], None], Callable[[Path], int]]] = {
    "xchannel": (lambda path, sync: Writer.open(path, region_bytes=65536, sync=sync), append, logged),
    "queue": (lambda path, sync: FileChannel.open(path, ChannelOptions(sync=sync)), append, logged),
    "message log": (lambda path, sync: MessageLog.open(path, sync=sync), append, logged),
    "append log": (
        lambda path, sync: AppendLogStore.open(path, AppendLogOptions(sync=sync)), apply, counted(AppendLogStore)
    ),
    "lmdb": (lambda path, sync: LmdbStore.open(path, sync=sync), apply, counted(LmdbStore)),
    "rocksdb": (
        lambda path, sync: RocksStore.open(path, RocksOptions(cache_bytes=0, sync=sync)), apply, counted(RocksStore)
    ),
}  # fmt: skip


@pytest.mark.parametrize("sync", ["none", "always"])
@pytest.mark.parametrize("name", KINDS)
def test_whatever_writes_goes_on_when_there_is_room(name: str, sync: str, device: Path) -> None:
    opening, write, count = KINDS[name]
    handle = opening(device / "data", sync)
    acked = refused = number = 0
    for _ in range(20):
        number, acked = number + 1, acked + 1
        write(handle, number)
    fill(device)
    while refused < 5 and number < 5000:
        number += 1
        try:
            write(handle, number)
            acked += 1
        except (OSError, PenstockError):
            refused += 1
    assert refused == 5
    os.unlink(device / "ballast")
    if name == "rocksdb":  # its log has a torn end, and it says so
        with pytest.raises(ReadOnlyError, match="until it is opened again"):
            write(handle, number + 1)
        with contextlib.suppress(OSError):
            handle.close()
        handle = opening(device / "data", sync)
    for _ in range(20):
        number, acked = number + 1, acked + 1
        write(handle, number)
    handle.close()
    assert count(device / "data") == acked


def test_reading_a_shipped_log_without_room_for_what_is_fetched_is_refused(device: Path, tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log") as log:
        log.append_many([os.urandom(3000) for _ in range(4000)])
        log.roll()
    with Shipper(tmp_path / "log", object_store_for(tmp_path / "up")) as shipper:
        shipper.step()
    command = [sys.executable, "-m", "penstock.cli.main", "cat", str(tmp_path / "up" / "log"), "--json"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "TMPDIR": str(device)}, check=False)
    assert done.returncode == 1, done.stderr
    assert b"No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("kind", [AppendLogStore, RocksStore, LmdbStore])
def test_an_export_to_a_full_device_names_it_and_leaves_nothing(kind: Any, device: Path, tmp_path: Path) -> None:
    with kind.open(tmp_path / "fold") as store:
        for number in range(20):
            updates = [KvUpdate.put(f"{number}.{at}", os.urandom(900), 1) for at in range(100)]
            store.apply(updates, WatchCursor.of(number + 1))
        fill(device)
        with pytest.raises(OSError, match="No space left") as raised:
            export_store(store, device / "artifact")
        assert str(raised.value.filename).startswith(str(device))
        assert os.listdir(device) == ["ballast"]
        store.apply([KvUpdate.put("a", b"1", 21)], WatchCursor.of(21))  # the store itself has room
        (device / "ballast").unlink()
        assert export_store(store, device / "artifact").cursor == WatchCursor.of(21)
