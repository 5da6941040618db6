"""The filechannel passes the suite of all logs, in each of its shapes."""

from __future__ import annotations

from typing import Any

from penstock.log.face import LogReader
from penstock.log.filechannel import ChannelOptions, FileChannel, FileChannelLog
from penstock.testing.log_conformance import LogConformance


class TestFileChannel(LogConformance):
    options = ChannelOptions(sync="none")

    def open_writer(self, path: str) -> Any:
        return FileChannel.open(path, self.options)

    def open_reader(self, path: str) -> LogReader:
        return FileChannelLog(path)


class TestFileChannelInSmallSegments(TestFileChannel):
    """A few messages a segment: reads cross live, mapped and compressed ones."""

    options = ChannelOptions(sync="none", segment_bytes=700)


class TestFileChannelGzip(TestFileChannel):
    options = ChannelOptions(sync="none", segment_bytes=1500, compression="gzip")


class TestFileChannelPlain(TestFileChannel):
    options = ChannelOptions(sync="none", segment_bytes=300, compression="none")


class TestFileChannelWithRetention(TestFileChannel):
    payloads = (b"x" * 100,) * 30
    options = ChannelOptions(sync="none", segment_bytes=1000, keep_bytes=6000, policy="drop_oldest")

    def expire(self, writer: Any) -> None:
        for _ in range(40):
            writer.append(b"y" * 100)


class TestFileChannelSynced(TestFileChannel):
    payloads = (b"", b"a", b"hello", b"x" * 3000)
    options = ChannelOptions(sync="always")


class TestFileChannelInterval(TestFileChannel):
    options = ChannelOptions(sync="interval", sync_seconds=0.005, segment_bytes=2000)
