"""Penstock keeps messages in durable channels on disk and carries them to whatever turns them into work.

>>> import penstock
>>> penstock.__version__
'0.1.0'
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.batch import Batch, Spans, UpdateBatch
    from penstock.errors import PenstockError
    from penstock.log.detect import open_log
    from penstock.log.xchannel import Reader, Writer
    from penstock.types import KvEntry, KvUpdate, Op, Problem, Record, VersionToken, WatchCursor

__version__ = "0.1.0"

__all__ = [
    "Writer",
    "Reader",
    "open_log",
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
