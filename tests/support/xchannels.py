"""What several tests of an xchannel use: reading all there is, taking one record, damaging a file, counting looks."""

from __future__ import annotations

from pathlib import Path

from penstock.disk import PosixDisk, Stat
from penstock.disk.posix import PosixFile
from penstock.log.xchannel import Reader


class CountingDisk(PosixDisk):
    """A disk that counts what is asked of it by name."""

    calls = 0

    def list(self, folder: str) -> list[str]:
        self.calls += len(names := super().list(folder))
        return names

    def stat(self, path: str) -> Stat | None:
        self.calls += 1
        return super().stat(path)

    def open(self, path: str) -> PosixFile:
        self.calls += 1
        return super().open(path)


def payloads(reader: Reader) -> list[bytes]:
    return [bytes(record.payload) for record in reader.records(timeout=0)]


def taken(reader: Reader) -> bytes:
    record = reader.try_read()
    assert record is not None
    return bytes(record.payload)


def put(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
