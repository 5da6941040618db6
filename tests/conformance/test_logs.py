"""Every log format passes the one suite of penstock.testing."""

from __future__ import annotations

from typing import Any

from penstock.log.face import LogReader
from penstock.log.xchannel import Writer, XChannelLog
from penstock.testing.log_conformance import LogConformance


class TestXChannel(LogConformance):
    def open_writer(self, path: str) -> Any:
        return Writer.open(path)

    def open_reader(self, path: str) -> LogReader:
        return XChannelLog(path)


class TestXChannelInSmallPieces(LogConformance):
    """A region a page, a file a few regions: every read crosses one or the other."""

    def open_writer(self, path: str) -> Any:
        return Writer.open(path, region_bytes=4096, roll_bytes=10_000)

    def open_reader(self, path: str) -> LogReader:
        return XChannelLog(path)


class TestXChannelWithRetention(TestXChannelInSmallPieces):
    payloads = (b"x" * 100,) * 30

    def open_writer(self, path: str) -> Any:
        return Writer.open(path, region_bytes=4096, roll_bytes=8192, keep_files=2)

    def expire(self, writer: Any) -> None:
        for _ in range(4):
            writer.roll()
            writer.append(b"later")


class TestXChannelSynced(LogConformance):
    payloads = (b"", b"a", b"hello", b"x" * 3000)

    def open_writer(self, path: str) -> Any:
        return Writer.open(path, sync="always")

    def open_reader(self, path: str) -> LogReader:
        return XChannelLog(path)
