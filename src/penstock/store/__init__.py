"""Floor 3: a store keeps key → (value, version) on disk together with one cursor, changed atomically."""

from penstock.store.appendlog import AppendLogStore
from penstock.store.detect import detect_backend, open_store
from penstock.store.digest import digest_entries
from penstock.store.face import SnapshotStore, StoreReader
from penstock.store.lightning import LmdbStore
from penstock.store.options import AppendLogOptions, LmdbOptions, RocksOptions
from penstock.store.rocks import RocksStore
from penstock.store.snapshot import Snapshot, SnapshotWriter, load

__all__ = [
    "SnapshotStore",
    "StoreReader",
    "AppendLogStore",
    "RocksStore",
    "LmdbStore",
    "AppendLogOptions",
    "RocksOptions",
    "LmdbOptions",
    "Snapshot",
    "SnapshotWriter",
    "load",
    "digest_entries",
    "open_store",
    "detect_backend",
]
