"""The message log: numbered entries with sender and time, in segments with a sparse index.

Byte-compatible with the log directories of narwhal 0.7.0.
"""

from penstock.log.messagelog.format import LogEntry
from penstock.log.messagelog.log import MessageLogReader
from penstock.log.messagelog.options import MessageLogOptions, RetainBy
from penstock.log.messagelog.writer import MessageLog

__all__ = ["MessageLog", "MessageLogReader", "MessageLogOptions", "LogEntry", "RetainBy"]
