"""Every kind of owner there is, for the suites that try all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer
from penstock.store import AppendLogStore, LmdbStore, RocksStore, SnapshotWriter
from penstock.store.options import RocksOptions
from penstock.types import KvUpdate, WatchCursor


@dataclass(frozen=True)
class Owner:
    """How something is opened by its one owner, used once, and counted."""

    name: str
    folder: bool
    open: Callable[[Path], Any]
    use: Callable[[Any, int], Any]
    data: Callable[[Path], list[Path]]
    """The files that hold what was written."""
    locks: Callable[[Path], list[Path]]


def apply(store: Any, number: int) -> None:
    store.apply([KvUpdate.put(f"k{number}", b"v", number)], WatchCursor.of(number))


def checkpoint(writer: Any, number: int) -> None:
    writer.write_update(KvUpdate.put(f"k{number}", b"v", number))
    writer.checkpoint(WatchCursor.of(number))


def beside(*endings: str) -> Callable[[Path], list[Path]]:
    return lambda path: [path.with_name(path.name + ending) for ending in endings]


def inside(*patterns: str) -> Callable[[Path], list[Path]]:
    return lambda path: [file for pattern in patterns for file in sorted(path.glob(pattern))]


OWNERS = [
    Owner("xchannel", False, Writer.open, lambda w, n: w.append(b"x%d" % n), lambda p: [p], beside(".penstock-lock")),
    Owner("append-log", False, AppendLogStore.open, apply, lambda p: [p], beside(".penstock-lock")),
    Owner("snapshot", False, SnapshotWriter.open, checkpoint, lambda p: [p], beside(".penstock-lock")),
    Owner(
        "rocksdb",
        True,
        lambda path: RocksStore.open(path, RocksOptions(cache_bytes=0)),
        apply,
        inside("*.log", "MANIFEST-*"),
        inside("LOCK"),
    ),
    Owner("lmdb", True, LmdbStore.open, apply, inside("data.mdb"), inside("penstock-lock", "lock.mdb")),
    Owner(
        "filechannel",
        True,
        lambda path: FileChannel.open(path, ChannelOptions(sync="none")),
        lambda channel, n: channel.tx().send(b"x%d" % n),
        inside("segment.*"),
        inside("lock"),
    ),
    Owner(
        "messagelog", True, MessageLog.open, lambda w, n: w.append(b"x%d" % n), inside("*.log"), inside("penstock-lock")
    ),
]
