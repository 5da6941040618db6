"""What opening a damaged message log does, and what it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.log.messagelog import MessageLog, MessageLogOptions, MessageLogReader
from penstock.log.messagelog.format import segment_name
from penstock.log.messagelog.recover import TRUNCATIONS

SMALL = MessageLogOptions(sync="none", segment_bytes=600)
ONE = b"x" * 100  # 126 bytes an entry


PAST_THE_END = bytes(12) + (1).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little")


def write(path: Path, count: int, options: MessageLogOptions = SMALL) -> None:
    with MessageLog.open(path, options) as log:
        log.append_many([ONE] * count, timestamp_ns=5_000_000)


def log_file(path: Path, number: int = 1, ending: str = ".log") -> Path:
    return path / (segment_name(number) + ending)


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x40
    path.write_bytes(data)


def seqs(path: Path) -> list[int]:
    with MessageLogReader(path) as log:
        return [entry.seq for entry in log.entries()]


@pytest.mark.parametrize("cut", [1, 3, 50, 100, 105, 125])
def test_a_torn_tail_is_cut_and_needs_no_file_of_its_own(cut: int, tmp_path: Path) -> None:
    write(tmp_path, 4)
    with log_file(tmp_path).open("r+b") as file:
        file.truncate(4 * 126 - cut)
    with MessageLog.open(tmp_path, SMALL) as log:
        assert log.last_seq == 3
        assert log.repairs == []
        assert log_file(tmp_path).stat().st_size == 3 * 126
    assert list(tmp_path.glob("*.bad")) == []


def test_zeros_at_the_end_are_cut(tmp_path: Path) -> None:
    write(tmp_path, 2)
    with log_file(tmp_path).open("ab") as file:
        file.write(bytes(300))
    with MessageLog.open(tmp_path, SMALL) as log:
        assert (log.last_seq, log.repairs) == (2, [])


@pytest.mark.parametrize("byte", [126 + 30, 126 + 8, 126 + 16, 126 + 21, 2 * 126 - 1])
def test_intact_entries_behind_damage_stay_where_they_are(byte: int, tmp_path: Path) -> None:
    write(tmp_path, 4)
    flip(log_file(tmp_path), byte)
    before = log_file(tmp_path).read_bytes()
    with MessageLog.open(tmp_path, SMALL) as log:
        assert log.last_seq == 4
        (problem,) = log.repairs
        assert (problem.file, problem.byte) == (str(log_file(tmp_path)), 126)
        assert "2 is missing" in problem.reason
        assert log.append(b"five") == 5
    assert log_file(tmp_path).read_bytes() == before
    assert list(tmp_path.glob("*.bad")) == []
    assert seqs(tmp_path) == [1, 3, 4, 5]


@pytest.mark.parametrize("byte", [3 * 126 + 30, 3 * 126 + 8])
def test_what_is_cut_where_nothing_intact_follows_is_set_aside(byte: int, tmp_path: Path) -> None:
    write(tmp_path, 4)
    flip(log_file(tmp_path), byte)
    before = log_file(tmp_path).read_bytes()
    with MessageLog.open(tmp_path, SMALL) as log:
        assert log.last_seq == 3
        (problem,) = log.repairs
        assert (problem.file, problem.byte) == (str(log_file(tmp_path)), 3 * 126)
    (bad,) = tmp_path.glob("*.bad")
    assert log_file(tmp_path).read_bytes() + bad.read_bytes() == before
    with MessageLogReader(tmp_path) as reader:
        assert reader.stat()["set_aside"] == [bad.name]


def test_a_small_length_error_does_not_pass_for_a_torn_tail(tmp_path: Path) -> None:
    write(tmp_path, 4)
    data = bytearray(log_file(tmp_path).read_bytes())
    data[126 + 18 : 126 + 20] = (3 * 126).to_bytes(2, "little")  # just longer than what follows
    log_file(tmp_path).write_bytes(data)
    MessageLog.open(tmp_path, SMALL).close()
    assert log_file(tmp_path).read_bytes() == data
    assert seqs(tmp_path) == [1, 3, 4]


def test_an_active_segment_without_an_intact_entry_is_set_aside_and_the_sealed_one_not_reopened(
    tmp_path: Path,
) -> None:
    write(tmp_path, 6)
    sealed = log_file(tmp_path).read_bytes()
    flip(log_file(tmp_path, 6), 30)
    with MessageLog.open(tmp_path, SMALL) as log:
        assert log.last_seq == 5
        log.append(b"next", seq=6)
    assert log_file(tmp_path).read_bytes() == sealed
    assert seqs(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert len(list(tmp_path.glob("*.bad"))) == 1


def test_damage_in_a_sealed_segment_is_counted_and_its_file_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 12)
    flip(log_file(tmp_path, 6), 2 * 126 + 40)
    before, counted = log_file(tmp_path, 6).read_bytes(), TRUNCATIONS.value()
    with MessageLog.open(tmp_path, SMALL) as log:
        assert TRUNCATIONS.value() == counted + 1
        assert [problem.byte for problem in log.repairs] == [2 * 126]
    assert log_file(tmp_path, 6).read_bytes() == before
    assert seqs(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]


@pytest.mark.parametrize("kept", [0, 1, 60, 125])
@pytest.mark.parametrize("number", [1, 6])
def test_a_sealed_segment_cut_in_its_first_entry_is_kept_and_named(number: int, kept: int, tmp_path: Path) -> None:
    write(tmp_path, 12)
    with log_file(tmp_path, number).open("r+b") as file:
        file.truncate(kept)
    with MessageLog.open(tmp_path, SMALL) as log:
        assert [(problem.file, problem.byte) for problem in log.repairs] == [(str(log_file(tmp_path, number)), 0)]
        assert f"{number} to {number + 4} are missing" in log.repairs[0].reason
        assert log.append(b"next") == 13
    assert log_file(tmp_path, number).stat().st_size == kept
    with MessageLogReader(tmp_path) as reader:
        assert [entry.seq for entry in reader.entries()] == [n for n in range(1, 14) if not number <= n < number + 5]
        assert len(reader.damage) == 1
        assert f"{number} to {number + 4} are missing" in reader.damage[0].reason
        assert [str(problem) for problem in reader.verify()] == [str(reader.damage[0])]


def test_entries_that_were_synced_and_are_gone_are_told_of(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path, MessageLogOptions(sync="always", segment_bytes=600)) as log:
        log.append_many([ONE] * 4)
    with log_file(tmp_path).open("r+b") as file:
        file.truncate(2 * 126 + 40)
    with MessageLogReader(tmp_path) as reader:
        assert "everything below 5 was synced, but the log ends with 2" in reader.stat()["damage"][0].reason
        assert any("was synced" in problem.reason for problem in reader.verify())
    with MessageLog.open(tmp_path, SMALL) as log:
        assert any("was synced" in problem.reason for problem in log.repairs)
        assert log.append(b"next") == 5  # a number that was durable is not given out again
    (bad,) = tmp_path.glob("*.bad")
    assert len(bad.read_bytes()) == 40


@pytest.mark.parametrize("index", [None, b"", b"x" * 13, bytes(24), b"\1" + bytes(11), b"\xff" * 24, PAST_THE_END])
def test_an_index_that_cannot_be_is_rebuilt(index: bytes | None, tmp_path: Path) -> None:
    options = MessageLogOptions(sync="none", segment_bytes=30_000)
    write(tmp_path, 400, options)
    numbers = sorted(int(path.stem) for path in tmp_path.glob("*.log"))
    good = [log_file(tmp_path, number, ".idx").read_bytes() for number in numbers]
    for number in numbers:
        path = log_file(tmp_path, number, ".idx")
        path.unlink() if index is None else path.write_bytes(index)
    log_file(tmp_path, numbers[0], ".tmp").write_bytes(b"stale")
    log_file(tmp_path, numbers[-1], ".tmp").write_bytes(b"stale")
    with MessageLogReader(tmp_path) as reader:
        assert reader.read(300, 1).positions.tolist() == [300]  # the reader does without
    MessageLog.open(tmp_path, options).close()
    assert [log_file(tmp_path, number, ".idx").read_bytes() for number in numbers] == good
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_lower_payload_limit_throws_nothing_away(tmp_path: Path) -> None:
    write(tmp_path, 4)
    with MessageLog.open(tmp_path, MessageLogOptions(sync="none", max_payload_bytes=1)) as log:
        assert log.last_seq == 4
    assert seqs(tmp_path) == [1, 2, 3, 4]


def test_entries_numbered_0_at_the_end_are_set_aside_alone(tmp_path: Path) -> None:
    from penstock import kernel

    write(tmp_path, 2)
    zero = kernel.messagelog.encode_one(0, 0, b"", b"zero")
    with log_file(tmp_path).open("ab") as file:
        file.write(zero)
    with MessageLogReader(tmp_path) as reader:
        assert "number 0" in next(iter(reader.verify())).reason
    with MessageLog.open(tmp_path, SMALL) as log:
        assert log.last_seq == 2
    (bad,) = tmp_path.glob("*.bad")
    assert bad.read_bytes() == zero
