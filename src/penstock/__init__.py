"""Penstock keeps messages in durable channels on disk and carries them to whatever turns them into work.

>>> import penstock
>>> penstock.__version__
'0.1.0'
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.batch import Batch, Spans, UpdateBatch
    from penstock.channels import ChannelManager
    from penstock.errors import PenstockError
    from penstock.fold.applied import watch_applied
    from penstock.fold.follow import follow
    from penstock.kv import EmbeddedConnection, NatsConnection, StoreConfig, embedded_connect, nats_connect
    from penstock.log.detect import open_log, open_writer
    from penstock.log.filechannel import FileChannel
    from penstock.log.find import find_logs
    from penstock.log.messagelog import MessageLog
    from penstock.log.xchannel import Reader, Writer
    from penstock.store import AppendLogStore, LmdbStore, RocksStore, open_store
    from penstock.types import KvEntry, KvUpdate, Op, Problem, Record, VersionToken, WatchCursor

__version__ = "0.1.0"

__all__ = [
    "Writer",
    "Reader",
    "FileChannel",
    "MessageLog",
    "open_log",
    "open_writer",
    "find_logs",
    "AppendLogStore",
    "RocksStore",
    "LmdbStore",
    "open_store",
    "EmbeddedConnection",
    "embedded_connect",
    "NatsConnection",
    "nats_connect",
    "StoreConfig",
    "watch_applied",
    "follow",
    "ChannelManager",
    "Batch",
    "UpdateBatch",
    "Spans",
    "Record",
    "Problem",
    "Op",
    "KvEntry",
    "KvUpdate",
    "VersionToken",
    "WatchCursor",
    "PenstockError",
    "__version__",
]

# Each name is imported when it is first asked for, so that whoever needs one floor (the command line, a Spark worker)
# does not load the others.  The same names stand above for type checkers.
_HOMES = {
    "Writer": "penstock.log.xchannel",
    "Reader": "penstock.log.xchannel",
    "open_log": "penstock.log.detect",
    "FileChannel": "penstock.log.filechannel",
    "MessageLog": "penstock.log.messagelog",
    "open_writer": "penstock.log.detect",
    "find_logs": "penstock.log.find",
    "AppendLogStore": "penstock.store",
    "RocksStore": "penstock.store",
    "LmdbStore": "penstock.store",
    "open_store": "penstock.store",
    "EmbeddedConnection": "penstock.kv",
    "NatsConnection": "penstock.kv",
    "StoreConfig": "penstock.kv",
    "embedded_connect": "penstock.kv",
    "nats_connect": "penstock.kv",
    "watch_applied": "penstock.fold.applied",
    "follow": "penstock.fold.follow",
    "ChannelManager": "penstock.channels",
    "Batch": "penstock.batch",
    "UpdateBatch": "penstock.batch",
    "Spans": "penstock.batch",
    "Record": "penstock.types",
    "Problem": "penstock.types",
    "Op": "penstock.types",
    "KvEntry": "penstock.types",
    "KvUpdate": "penstock.types",
    "VersionToken": "penstock.types",
    "WatchCursor": "penstock.types",
    "PenstockError": "penstock.errors",
}

if not TYPE_CHECKING:  # a type checker that saw it would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
