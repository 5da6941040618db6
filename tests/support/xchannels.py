"""What several tests of an xchannel use: reading all there is, taking one record, damaging a file."""

from __future__ import annotations

from pathlib import Path

from penstock.log.xchannel import Reader


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
