"""Floor 2: logs.  One face for every format, and the formats in folders of their own."""

from penstock.log.detect import detect, open_log
from penstock.log.face import LogReader, LogWriter
from penstock.log.options import SyncMode

__all__ = ["LogReader", "LogWriter", "SyncMode", "detect", "open_log"]
