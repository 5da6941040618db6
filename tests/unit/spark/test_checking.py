"""What the tasks of an audit find in a log, without Spark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark import cloudpickle

from penstock.log.detect import open_writer
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.log.xchannel import Writer
from penstock.spark.source.checking import CheckSource, Finding, LogCheck, join_findings


def rows_of(reader: Any, partitions: Any) -> Iterator[Finding]:
    for partition in partitions:
        for batch in reader.read(partition):
            for row in batch.column("finding").to_pylist():
                yield msgspec.json.decode(row, type=Finding)


def check(path: Path, **options: str) -> dict[str, LogCheck]:
    source = CheckSource({"path": str(path), "partitionBytes": "4k", "partitions": "50", **options})
    reader = cloudpickle.loads(cloudpickle.dumps(source.reader(None)))  # type: ignore[arg-type]
    return {item.channel: item for item in join_findings(rows_of(reader, reader.partitions()))}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    payloads = [b"%05d" % n * 20 for n in range(2000)]
    with Writer.open(tmp_path / "ticks", region_bytes=4096, roll_bytes=16384) as ticks:
        ticks.append_many(payloads, timestamp_ns=list(range(2000)))
    with FileChannel.open(str(tmp_path / "queue"), ChannelOptions(segment_bytes=20_000)) as queue:
        for start in range(0, 2000, 100):
            queue.append_many(payloads[start : start + 100])
    with MessageLog.open(str(tmp_path / "messages"), MessageLogOptions(segment_bytes=20_000)) as messages:
        messages.append_many(payloads, timestamp_ns=[n * 10**6 for n in [*range(1999), 5]])
    return tmp_path


def test_whole_logs_of_all_formats_are_whole(tree: Path) -> None:
    found = check(tree)
    assert {name: (item.format, item.records, item.bytes) for name, item in found.items()} == {
        "ticks": ("xchannel", 2000, 200_000),
        "queue": ("filechannel", 2000, 200_000),
        "messages": ("messagelog", 2000, 200_000),
    }
    assert all(item.ok for item in found.values()), found
    assert (found["messages"].back_in_time, found["ticks"].back_in_time) == (1, 0)
    assert (found["messages"].first_position, found["messages"].last_position) == (1, 2000)


@pytest.mark.parametrize("name", ["queue", "messages"])
def test_a_flipped_byte_is_found_and_named(tree: Path, name: str) -> None:
    files = sorted(path for path in (tree / name).iterdir() if path.stat().st_size > 15_000)
    victim = files[len(files) // 2]
    with open(victim, "r+b") as file:
        file.seek(9_000)
        byte = file.read(1)
        file.seek(9_000)
        file.write(bytes([byte[0] ^ 0x40]))
    found = check(tree)
    assert not found[name].ok
    assert any(victim.name in text for text in found[name].problems), found[name].problems
    assert found["ticks"].ok


def test_a_lost_file_is_a_gap(tree: Path) -> None:
    for name in ("ticks.3", "ticks.4"):
        os.unlink(tree / name)
    folder = sorted(path for path in (tree / "messages").glob("*.log"))
    lost = folder[3]
    lost.unlink()
    lost.with_suffix(".idx").unlink(missing_ok=True)
    found = check(tree)
    for name in ("ticks", "messages"):
        assert not found[name].ok, found[name]
        assert found[name].gaps or found[name].problems


def test_numbers_that_are_missing_are_gaps(tmp_path: Path) -> None:
    with MessageLog.open(str(tmp_path / "log")) as log:
        log.append_many([b"a", b"b"], seq=[1, 2])
        log.append_many([b"c", b"d"], seq=[9, 11])
    (found,) = check(tmp_path).values()
    assert (found.records, found.gaps, found.disorder, found.ok) == (4, 2, 0, False)


def test_an_empty_log_is_whole(tmp_path: Path) -> None:
    open_writer(str(tmp_path / "log")).close()
    (found,) = check(tmp_path).values()
    assert (found.records, found.first_position, found.ok) == (0, None, True)


def test_what_retention_takes_during_an_audit_is_no_fault(tmp_path: Path) -> None:
    payloads = [b"%05d" % n * 20 for n in range(500)]
    with Writer.open(tmp_path / "ticks", region_bytes=4096, roll_bytes=16384, keep_files=3) as ticks:
        ticks.append_many(payloads)
        reader = CheckSource({"path": str(tmp_path), "partitionBytes": "4k", "partitions": "50"}).reader(None)  # type: ignore[arg-type]
        partitions = reader.partitions()
        findings = list(rows_of(reader, partitions[:2]))
        ticks.append_many(payloads[:200])
        findings += rows_of(reader, partitions[2:])
    (found,) = join_findings(findings)
    assert found.ok, found
    assert 0 < found.records < 500
