"""Penstock keeps messages in durable channels on disk and carries them to whatever turns them into work.

>>> import penstock
>>> penstock.__version__
'0.1.0'
"""

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
