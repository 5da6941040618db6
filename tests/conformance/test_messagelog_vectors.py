"""The message log against files of narwhal 0.7.0: read as listed, written with the same bytes, damage judged as listed.

Where the verdict here is a safer one, SAFER names the case and the page under docs/decisions says why.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.log import detect
from penstock.log.messagelog import LogEntry, MessageLog, MessageLogOptions, MessageLogReader

VECTORS = Path(__file__).parents[1] / "vectors" / "messagelog"
SOUND = sorted(path.name for path in (VECTORS / "log").iterdir())
DAMAGED = sorted(path.name for path in (VECTORS / "log_damaged").iterdir())
BIG = {"big_numbers"}
SAFER = {
    "smaller_max_payload_cut": "040",  # a lower limit throws no stored entry away
    "seq_zero_entry": "042",  # an entry numbered 0 costs only itself
    "repeat_seq_entry": "042",  # numbers never go back
    "overlapping_segment": "042",
    "name_zero": "042",
    "idx_sealed_wrong_offset": "043",  # an index that lies is found out
    "idx_sealed_wrong_seq": "043",
    "crc_middle": "048",  # intact entries behind damage stay
    "payload_flip_middle": "048",
    "payload_len_flip": "048",
    "from_len_flip": "048",
    "timestamp_flip": "048",
    "first_entry_bad": "048",
    "active_all_bad": "048",
    "sealed_middle_bad": "048",
    "sealed_first_entry_bad": "048",
    "oldest_first_entry_bad": "048",
    "sealed_zero_size": "048",
}


def load(kind: str, name: str) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads((VECTORS / kind / name / "expected.json").read_text())
    return expected


def restore(kind: str, name: str, target: Path) -> dict[str, Any]:
    expected = load(kind, name)
    target.mkdir()
    for file, about in expected["files"].items():
        source = VECTORS / kind / name / "data" / file
        shutil.copy(source, target / file)
        if "stored_size" in about:
            with (target / file).open("r+b") as handle:
                handle.truncate(about["size"])
    assert files_of(target) == digests(expected["files"])
    return expected


def files_of(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if not path.name.startswith("penstock-") and not path.name.endswith(".bad")
    }


def digests(files: dict[str, Any]) -> dict[str, str]:
    return {name: about["sha256"] for name, about in files.items()}


def options_of(expected: dict[str, Any], **more: Any) -> MessageLogOptions:
    return MessageLogOptions(
        sync="none",
        segment_bytes=expected["segment_max_bytes"],
        max_payload_bytes=expected["max_payload_size"],
        retention="fifo" if expected["mode"] == "fifo" else "count",
        **more,
    )


def entries_of(folder: Path, from_seq: int = 1, limit: int = 1_000_000) -> list[LogEntry]:
    with MessageLogReader(folder) as log:
        return list(log.entries(from_seq, limit))


def check_reads(folder: Path, expected: dict[str, Any]) -> None:
    listed = expected["read_all"]
    found = entries_of(folder)
    assert [entry.seq for entry in found] == listed["seqs"]
    assert [hashlib.sha256(entry.payload).hexdigest()[:12] for entry in found] == listed["payload_sha256_12"]
    for read in expected["reads"]:
        assert [entry.seq for entry in entries_of(folder, read["from_seq"], read["limit"])] == read["seqs"], read


def append_next(log: MessageLog, expected: dict[str, Any]) -> None:
    entry = expected["append_next"]
    log.append(
        bytes.fromhex(entry["payload_hex"]),
        seq=entry["seq"],
        sender=entry["from"],
        timestamp_ms=entry["timestamp"],
    )


@pytest.mark.parametrize("name", SOUND)
def test_a_log_of_the_original_is_read_as_listed(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    expected = restore("log", name, folder)
    before = files_of(folder)
    assert detect(str(folder)) == "messagelog"
    check_reads(folder, expected)
    for segment in expected.get("segments", ()):
        for entry in segment["entries"]:
            (found,) = entries_of(folder, entry["seq"], 1)
            sender = entry.get("from", "").encode() or bytes.fromhex(entry.get("from_hex", ""))
            assert (found.seq, found.timestamp_ms, found.sender) == (entry["seq"], entry["timestamp"], sender)
            assert len(found.payload) == entry["payload_len"]
    assert files_of(folder) == before


@pytest.mark.parametrize("name", [name for name in SOUND if name not in BIG])
def test_the_face_reads_the_same(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    restore("log", name, folder)
    with MessageLogReader(folder) as log:
        batch_entries, position = [], log.first_position
        while len(batch := log.read(position, 7)):
            batch_entries += [
                LogEntry(r.position, r.timestamp_ns // 1_000_000, bytes(r.extra["from"]), bytes(r.payload))  # type: ignore[operator,index,arg-type]
                for r in batch
            ]
            position = batch.next_position
        assert position == log.next_position
        assert batch_entries == list(log.entries())
        gaps = [problem for problem in log.verify() if not problem.reason.startswith("a gap")]
        assert gaps == []


@pytest.mark.parametrize("name", SOUND)
def test_opening_and_appending_leave_the_bytes_of_the_original(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    expected = restore("log", name, folder)
    with MessageLog.open(folder, options_of(expected)) as log:
        state = {"first_seq": log.first_seq, "last_seq": log.last_seq}
        assert state == {key: expected["open"][key] for key in state}
        assert files_of(folder) == digests(expected["after_open"])
        append_next(log, expected)
        assert files_of(folder) == digests(expected["append_next"]["files_after"])
    assert [entry.seq for entry in entries_of(folder)] == expected["append_next"]["seqs_after"]


@pytest.mark.parametrize("many", [False, True], ids=["one-by-one", "at-once"])
@pytest.mark.parametrize("name", SOUND)
def test_the_same_entries_are_written_with_the_same_bytes(name: str, many: bool, tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    expected = restore("log", name, original)
    entries = entries_of(original)
    with MessageLog.open(copy, options_of(expected, max_messages=expected["max_messages"])) as log:
        if many and name not in BIG:
            log.append_many(
                [entry.payload for entry in entries],
                sender=[entry.sender for entry in entries],
                timestamp_ns=[entry.timestamp_ms * 1_000_000 for entry in entries],
                seq=[entry.seq for entry in entries],
            )
        else:
            for entry in entries:
                log.append(entry.payload, sender=entry.sender, timestamp_ms=entry.timestamp_ms, seq=entry.seq)
        assert files_of(copy) == digests(expected["files"])
        assert log.last_seq == expected["state_at_close"]["last_seq"]
        assert log.first_seq == expected["state_at_close"]["first_seq"]


@pytest.mark.parametrize("name", [name for name in DAMAGED if name not in SAFER])
def test_a_damaged_log_gets_the_verdict_of_the_original(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    expected = restore("log_damaged", name, folder)
    with MessageLog.open(folder, options_of(expected)) as log:
        state = {"first_seq": log.first_seq, "last_seq": log.last_seq}
        assert state == {key: expected["open"][key] for key in state}
        assert files_of(folder) == digests(expected["after_open"])
        check_reads(folder, expected)
        append_next(log, expected)
        assert files_of(folder) == digests(expected["append_next"]["files_after"])
    assert [entry.seq for entry in entries_of(folder)] == expected["append_next"]["seqs_after"]


@pytest.mark.parametrize("name", DAMAGED)
def test_reading_a_damaged_log_changes_nothing_and_loses_nothing_the_original_keeps(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    expected = restore("log_damaged", name, folder)
    before = files_of(folder)
    found = {entry.seq for entry in entries_of(folder)}
    assert found >= set(expected["read_all"]["seqs"])
    with MessageLogReader(folder) as log:
        list(log.verify())
        log.stat()
    assert files_of(folder) == before


@pytest.mark.parametrize("name", sorted(SAFER))
def test_where_the_original_loses_entries_they_are_kept(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    expected = restore("log_damaged", name, folder)
    stored = {entry.seq for entry in entries_of(folder)}
    with MessageLog.open(folder, options_of(expected)) as log:
        kept = [entry.seq for entry in entries_of(folder)]
        assert stored <= set(kept)
        assert kept == sorted(set(kept))
        assert set(expected["read_all"]["seqs"]) <= set(kept)
        assert log.last_seq == max(kept)
        assert log.append(b"next") == max(kept) + 1
    for read in expected["reads"]:
        found = [entry.seq for entry in entries_of(folder, read["from_seq"], read["limit"])]
        assert found == [seq for seq in [*kept, max(kept) + 1] if seq >= read["from_seq"]][: read["limit"]]


def test_refusals_are_those_of_the_original(tmp_path: Path) -> None:
    expected = load("log", "refusals")
    with MessageLog.open(tmp_path / "log", options_of(expected)) as log:
        for attempt in expected["attempts"]:
            sender, payload = b"s" * attempt["from_len"], b"p" * attempt["payload_len"]
            if "ok" in attempt["result"]:
                log.append(payload, sender=sender, seq=attempt["seq"])
                assert (log.first_seq, log.last_seq) == tuple(attempt["result"]["ok"].values()), attempt
                continue
            before = files_of(tmp_path / "log")
            with pytest.raises(ValueError, match=r"seq|sender|payload"):
                log.append(payload, sender=sender, seq=attempt["seq"])
            assert files_of(tmp_path / "log") == before
