"""The channels of tests/vectors/xchannel: put back on disk, and their operations done again by our writer."""

from __future__ import annotations

import hashlib
import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import OptionsError, PenstockError
from penstock.log.xchannel import Reader, Writer

ARCHIVE = Path(__file__).parents[1] / "vectors" / "xchannel" / "cases.json.xz"


@cache
def cases() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lzma.decompress(ARCHIVE.read_bytes()))
    return found


def names(*, hand_made: bool) -> list[str]:
    return sorted(name for name, case in cases().items() if case["hand_made"] is hand_made)


def generated(seed: int, length: int) -> bytes:
    """Return the payload of that seed: 64-bit words, the last one cut."""
    words = np.arange(1, (length + 7) // 8 + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    words += np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    return words.astype("<u8").tobytes()[:length]


def restore(name: str, folder: Path) -> Path:
    """Put the files of a case into a folder and return the path of the channel."""
    for file, kept in cases()[name]["files"].items():
        data = bytearray(kept["bytes"])
        for offset, seed, length in kept["payloads"]:
            data[offset : offset + length] = generated(seed, length)
        for offset, run in kept["runs"]:
            data[offset : offset + len(run) // 2] = bytes.fromhex(run)
        assert hashlib.sha256(data).hexdigest() == kept["sha256"], f"{name}/{file}"
        (folder / file).write_bytes(data)
    return folder / "chan"


def expected(name: str) -> list[tuple[int, int, int, int, str]]:
    """Return (position, kind, timestamp, length, digest) of each record 2.0.0 reads."""
    return [
        (
            (line["file_seq"] << 40) + line["offset"],
            line["kind"],
            line["timestamp_ns"],
            line["length"],
            line.get("sha256") or hashlib.sha256(bytes.fromhex(line["payload"])).hexdigest(),
        )
        for line in cases()[name]["expected"][:-1]
    ]


def row(record: Any) -> tuple[int, int, int, int, str]:
    """Return a record in the form of ``expected``."""
    payload = record.payload
    return (
        record.position,
        record.kind,
        record.timestamp_ns,
        len(payload),
        hashlib.sha256(payload).hexdigest(),
    )


def drain(reader: Reader, limit: int | None = None) -> list[tuple[int, int, int, int, str]]:
    """Read all there is, one by one or in batches of ``limit``."""
    found = []
    if limit is None:
        while (record := reader.try_read()) is not None:
            found.append(row(record))
        return found
    while len(batch := reader.read_batch(limit)):
        assert len(batch) <= limit
        found += [row(record) for record in batch]
    return found


def payload_of(op: dict[str, Any]) -> bytes:
    return op["text"].encode() if "text" in op else generated(op["seed"], op["len"])


def perform(ops: list[dict[str, Any]], folder: Path) -> list[tuple[dict[str, Any], PenstockError | OSError]]:
    """Do the operations with our writer; return those that were refused."""
    writers: dict[str, Writer] = {}
    refused: list[tuple[dict[str, Any], PenstockError | OSError]] = []
    for op in ops:
        name = op.get("writer", "main")
        try:
            match op["op"]:
                case "open":
                    writers[name] = Writer.open(
                        folder / op.get("file", "chan"),
                        region_bytes=op["region"],
                        roll_bytes=op.get("roll", 0),
                        max_message_bytes=op.get("mtu", 0),
                    )
                case "append":
                    data = payload_of(op)
                    writers[name].append(data, kind=op["kind"], timestamp_ns=op["timestamp_ns"])
                case "reserve":
                    data = payload_of(op)
                    writers[name].reserve(len(data))[:] = data
                case "commit":
                    writers[name].commit(op["len"], kind=op["kind"], timestamp_ns=op["timestamp_ns"])
                case "roll":
                    writers[name].roll()
                case "close":
                    writers.pop(name).close()
                case other:
                    raise OptionsError(f"no operation {other}")
        except (PenstockError, OSError) as exc:
            refused.append((op, exc))
    for writer in writers.values():
        writer.close()
    return refused


def channel_files(folder: Path) -> dict[str, bytes]:
    """Return the channel's files with the wall clock of their Rolls masked."""
    found = {}
    for path in sorted(folder.iterdir()):
        if "penstock-" not in path.name:
            found[path.name] = mask_roll(path.read_bytes())
    return found


def mask_roll(data: bytes) -> bytes:
    """Return a file with the time of its Roll set to zero: nothing else differs between two runs."""
    masked, at = bytearray(data), 0
    region = int.from_bytes(data[40:44], "little")
    while at + 16 <= len(data) and data[at] == 1:
        if data[at + 1] == 3:
            masked[at + 8 : at + 16] = bytes(8)
            break
        at += (16 + int.from_bytes(data[at + 4 : at + 8], "little") + 7) // 8 * 8
    assert region
    return bytes(masked)
