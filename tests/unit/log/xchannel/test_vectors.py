"""Promise: the files of xchannel 2.0.0 are read record by record and written byte by byte, and damage has an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import xchannel_vectors as vectors

from penstock.errors import CorruptionError, OptionsError, PenstockError
from penstock.log.xchannel import Reader, Writer, XChannelLog

SOUND = vectors.names(hand_made=False)
DAMAGED = vectors.names(hand_made=True)

# Refused here, let pass by 2.0.0: docs/decisions/004.  The bytes differ by exactly that.
REFUSED = {"commit_without_reserve", "reopen_wrong_region"}

# What each damaged channel gives: (records, end) of a late joiner, end of a live reader, and what a writer does.
# An end is None where the reader waits for more, else the file and the byte that its CorruptionError names.
# The writer "appends" and its record is found by every reader, "appends past" damage that stops late joiners
# until they step over it, or "refuses".  Where 2.0.0 answers otherwise: docs/decisions/001 to 005.
VERDICTS: dict[str, tuple[int, tuple[str, int] | None, tuple[str, int] | None, str]] = {
    "all_zero": (0, ("chan", 0), ("chan", 0), "refuses"),
    "bad_commit_2": (2, ("chan", 192), ("chan", 192), "refuses"),
    "bad_commit_255_first": (0, ("chan", 80), ("chan", 80), "refuses"),
    "bad_commit_next_slot": (5, ("chan", 360), ("chan", 360), "refuses"),
    "bad_kind_4_second_region": (1, ("chan", 4097), ("chan", 4097), "refuses"),
    "bad_kind_9": (2, ("chan", 193), ("chan", 193), "refuses"),
    "bad_kind_uncommitted": (5, None, None, "appends"),
    "bad_length_max": (2, ("chan", 196), ("chan", 196), "refuses"),
    "bad_length_one_too_many": (2, ("chan", 196), ("chan", 196), "refuses"),
    "bad_length_past_region": (2, ("chan", 196), ("chan", 196), "refuses"),
    "bad_skip_length": (1, ("chan", 3100), None, "appends past"),
    "bad_skip_past_region": (1, ("chan", 3100), None, "appends past"),
    "channel_kind_midway": (2, ("chan", 193), ("chan", 193), "refuses"),
    "first_bad_commit": (0, ("chan", 0), ("chan", 0), "refuses"),
    "first_bad_kind": (0, ("chan", 1), ("chan", 1), "refuses"),
    "first_file_deleted": (2, None, None, "appends"),
    "first_not_channel": (0, ("chan", 1), ("chan", 1), "refuses"),
    "first_not_committed": (0, ("chan", 0), ("chan", 0), "refuses"),
    "first_other_length": (0, ("chan", 4), ("chan", 4), "refuses"),
    "garbage_behind_next_slot": (5, None, None, "appends"),
    "hole_in_sequence": (1, ("chan.1", 0), None, "appends past"),
    "length_leaves_8_bytes": (3, ("chan", 4088), ("chan", 4088), "refuses"),
    "length_leaves_8_bytes_two_regions": (1, ("chan", 4088), None, "appends past"),
    "length_to_region_end": (3, ("chan", 4096), ("chan", 4096), "refuses"),
    "position_0": (5, None, None, "appends"),
    "position_past_end": (5, None, None, "appends"),
    "position_too_high": (5, None, None, "appends"),
    "position_unaligned": (5, None, None, "appends"),
    "region_size_0": (0, ("chan", 40), ("chan", 40), "refuses"),
    "region_size_5000": (0, ("chan", 40), ("chan", 40), "refuses"),
    "region_size_smaller": (1, ("chan", 3100), ("chan", 4096), "refuses"),
    "region_size_too_large": (5, ("chan", 4096), ("chan", 4096), "refuses"),
    "roll_with_bad_length": (2, ("chan", 148), None, "appends past"),
    "roll_with_length": (4, None, None, "appends"),
    "stale_no_next_header": (5, None, None, "appends"),
    "stale_position_only": (5, None, None, "appends"),
    "stale_roll_missing": (4, None, None, "appends"),
    "stale_roll_missing_fresh": (2, None, None, "appends"),
    "stale_roll_position": (4, None, None, "appends"),
    "stale_skip": (1, None, None, "appends"),
    "stale_two_records": (5, None, None, "appends"),
    "stale_write_position": (5, None, None, "appends"),
    "stray_number": (5, None, None, "appends"),
    "stray_other_names": (5, None, None, "appends"),
    "successor_all_zero": (2, ("chan.1", 0), ("chan.1", 0), "refuses"),
    "successor_missing": (2, ("chan.1", 0), ("chan.1", 0), "appends"),
    "successor_other_region": (2, ("chan.1", 40), None, "refuses"),
    "successor_zero_length": (2, ("chan.1", 0), ("chan.1", 0), "refuses"),
    "truncated_before_region_size": (0, ("chan", 40), ("chan", 40), "refuses"),
    "truncated_in_header": (0, ("chan", 50), ("chan", 50), "refuses"),
    "truncated_in_record": (2, ("chan", 200), ("chan", 200), "refuses"),
    "truncated_mid_region_8192": (1, ("chan", 4096), ("chan", 4096), "refuses"),
    "truncated_second_region": (1, ("chan", 4096), ("chan", 4096), "refuses"),
    "uncommitted_payload": (4, None, None, "appends"),
    "wrong_sequence_field": (4, None, None, "appends"),
    "zero_length": (0, ("chan", 0), ("chan", 0), "refuses"),
}

# Changed by hand, yet nothing a channel may not look like after an ordinary life.
NOT_DAMAGE = {
    "bad_kind_uncommitted",
    "first_file_deleted",
    "garbage_behind_next_slot",
    "roll_with_length",
    "stray_number",
    "stray_other_names",
    "uncommitted_payload",
}


def test_every_case_is_here() -> None:
    assert len(SOUND) == 39
    assert sorted(VERDICTS) == DAMAGED


# --- Undamaged


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_channel_is_read_record_by_record(name: str, tmp_path: Path) -> None:
    path = vectors.restore(name, tmp_path)
    for limit in (None, 1, 7, 1 << 16):
        with Reader.open(path) as reader:
            assert vectors.drain(reader, limit) == vectors.expected(name), limit


@pytest.mark.parametrize("name", SOUND)
def test_a_live_reader_of_a_finished_channel_finds_nothing(name: str, tmp_path: Path) -> None:
    path = vectors.restore(name, tmp_path)
    with Reader.open(path, "latest") as reader:
        assert reader.try_read() is None
        assert len(reader.read_batch()) == 0


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_channel_has_no_problems(name: str, tmp_path: Path) -> None:
    with XChannelLog(vectors.restore(name, tmp_path)) as log:
        problems = [str(problem) for problem in log.verify()]
    if name.startswith("adopted_"):  # the file of another channel was taken for the successor
        assert any("channel_sequence is 0, but the name of the file says 1" in problem for problem in problems)
    else:
        assert problems == []


@pytest.mark.parametrize("name", [name for name in SOUND if name not in REFUSED])
def test_the_same_operations_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    vectors.restore(name, theirs)
    ops = vectors.cases()[name]["ops"]
    refused = vectors.perform(ops, ours)
    assert [op for op, _ in refused] == [op for op in ops if "error" in op]
    assert vectors.channel_files(ours) == vectors.channel_files(theirs)


def test_a_commit_without_a_reservation_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    ops = vectors.cases()["commit_without_reserve"]["ops"]
    refused = vectors.perform(ops, tmp_path)
    assert [op["op"] for op, _ in refused] == ["commit", "commit"]
    assert all(isinstance(exc, OptionsError) for _, exc in refused)
    with Reader.open(tmp_path / "chan") as reader:
        assert [row[1:4] for row in vectors.drain(reader)] == [(1, 12, 12)]


def test_an_open_with_another_region_size_changes_no_byte(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    vectors.restore("reopen_wrong_region", theirs)
    ops = vectors.cases()["reopen_wrong_region"]["ops"]
    refused = vectors.perform(ops, ours)
    assert [op for op, _ in refused] == [op for op in ops if "error" in op]
    a, b = vectors.channel_files(ours)["chan"], vectors.channel_files(theirs)["chan"]
    assert len(a) == 4096
    assert len(b) == 16384
    assert b[:4096] == a
    assert not any(b[4096:])


# --- Damaged


def verdict(path: Path, start: str) -> tuple[list[tuple[int, int, int, int, str]], tuple[str, int] | None]:
    found = []
    try:
        with Reader.open(path, start) as reader:  # type: ignore[arg-type]
            for _ in range(2):  # the second look goes past the first None: it checks more than the slot
                while (record := reader.try_read()) is not None:
                    found.append(vectors.row(record))
                reader.wait(0.01)
    except CorruptionError as exc:
        assert exc.reason
        return found, (Path(exc.file).name, exc.byte)
    return found, None


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_channel_has_the_listed_verdict(name: str, tmp_path: Path) -> None:
    path = vectors.restore(name, tmp_path)
    records, late, live, _ = VERDICTS[name]
    found, end = verdict(path, "earliest")
    assert (len(found), end) == (records, late)
    theirs = vectors.expected(name)
    assert found[: len(theirs)] == theirs[: len(found)]  # nothing 2.0.0 did not write, nothing out of order
    assert verdict(path, "latest") == ([], live)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_batch_hands_out_what_is_good_before_the_damage(name: str, tmp_path: Path) -> None:
    path = vectors.restore(name, tmp_path)
    records, late, _, _ = VERDICTS[name]
    for limit in (1, 7, 1 << 16):
        found = 0
        try:
            with Reader.open(path) as reader:
                while (count := len(reader.read_batch(limit))) or reader.wait(0.01):
                    found += count
        except CorruptionError as exc:
            assert (Path(exc.file).name, exc.byte) == late
        else:
            assert late is None
        assert found == records, limit


@pytest.mark.parametrize("name", DAMAGED)
def test_verify_names_the_damage(name: str, tmp_path: Path) -> None:
    path = vectors.restore(name, tmp_path)
    with XChannelLog(path) as log:
        problems = list(log.verify())
        log.stat()
    assert bool(problems) is (name not in NOT_DAMAGE)
    assert all(problem.reason and problem.byte >= 0 for problem in problems)
    _, late, _, _ = VERDICTS[name]
    if late is not None:
        assert late in {(Path(problem.file).name, problem.byte) for problem in problems}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_writer_refuses_or_its_records_are_found(name: str, tmp_path: Path) -> None:
    path = vectors.restore(name, tmp_path)
    before = vectors_bytes(tmp_path)
    records, _, _, does = VERDICTS[name]
    live = None
    if VERDICTS[name][2] is None:
        live = Reader.open(path, "latest")
    try:
        writer = Writer.open(path)
    except PenstockError as exc:
        assert does == "refuses"
        assert str(exc)
        assert vectors_bytes(tmp_path) == before  # a refusal changes no byte of the channel
        return
    finally:
        if live is not None and does == "refuses":
            live.close()
    payload = vectors.generated(77, 20)
    with writer:
        position = writer.append(payload, kind=77, timestamp_ns=77)
    assert does in ("appends", "appends past")
    if live is not None:
        with live:
            record = live.read(timeout=60)
            assert (record.position, record.kind, bytes(record.payload)) == (position, 77, payload)
    with Reader.open(path) as reader:
        rows, steps = [], 0
        while True:
            try:
                rows += vectors.drain(reader)
                break
            except CorruptionError:
                steps += 1
                assert does == "appends past"
                step_over(reader)
        assert rows[-1][:4] == (position, 77, 77, 20)
        assert bool(steps) is (does == "appends past")
        if does == "appends":
            assert len(rows) == max(records, len(vectors.expected(name))) + 1


def step_over(reader: Reader) -> None:
    """Go past damage, and past a file that is not there at all by its position."""
    try:
        assert reader.skip_damage() is not None
    except CorruptionError:
        reader.seek((reader.file_sequence + 2) << 40)


def vectors_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if "penstock-" not in path.name}


def read_all(log: XChannelLog) -> tuple[int, bool]:
    """Return how many records a log gives, and whether it stopped with an error."""
    at, count = log.first_position, 0
    try:
        while len(batch := log.read(at)):
            at, count = batch.next_position, count + len(batch)
    except CorruptionError:
        return count, True
    return count, False


@pytest.mark.parametrize("name", DAMAGED)
def test_a_log_that_passes_over_damage_comes_to_its_end_and_names_it(name: str, tmp_path: Path) -> None:
    """Also where a record ends with the file, which is no place that one can go to."""
    path = vectors.restore(name, tmp_path)
    with XChannelLog(path) as strict, XChannelLog(path, on_damage="skip") as log:
        before, stopped = read_all(strict)
        count, failed = read_all(log)
        assert (failed, bool(log.damage)) == (False, stopped)
        assert count >= before
