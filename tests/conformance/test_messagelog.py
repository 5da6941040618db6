"""The message log passes the suite of all logs, with one segment, with many, and synced."""

from __future__ import annotations

from typing import Any

from penstock.log.face import LogReader
from penstock.log.messagelog import MessageLog, MessageLogOptions, MessageLogReader
from penstock.testing.log_conformance import LogConformance


class TestMessageLog(LogConformance):
    options = MessageLogOptions()

    def open_writer(self, path: str) -> Any:
        return MessageLog.open(path, self.options)

    def open_reader(self, path: str) -> LogReader:
        return MessageLogReader(path)


class TestMessageLogWithoutSync(TestMessageLog):
    options = MessageLogOptions(sync="none")


class TestMessageLogInSmallSegments(TestMessageLog):
    """A few entries a segment: every read crosses one."""

    options = MessageLogOptions(sync="none", segment_bytes=2000)


class TestMessageLogWithRetention(TestMessageLog):
    payloads = (b"x" * 100,) * 30
    options = MessageLogOptions(sync="none", segment_bytes=1000, max_messages=1000)

    def expire(self, writer: Any) -> None:
        assert writer.drop_before(20) > 0


class TestMessageLogSynced(TestMessageLog):
    payloads = (b"", b"a", b"hello", b"x" * 3000)
    options = MessageLogOptions(sync="always")
