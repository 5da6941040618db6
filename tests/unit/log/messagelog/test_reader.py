"""What the reader of a message log promises beyond the common face."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import kernel
from penstock.disk import MemoryDisk, PosixDisk, Stat
from penstock.disk.posix import PosixFile
from penstock.errors import ClosedError, ExpiredError, OptionsError, ReplacedError
from penstock.log import detect, open_log
from penstock.log.messagelog import MessageLog, MessageLogOptions, MessageLogReader
from penstock.log.messagelog.folder import CRC_FAILURES
from penstock.log.messagelog.format import segment_name
from penstock.testing.faulty import FaultyDisk

LARGE = MessageLogOptions(sync="none", segment_bytes=30_000)


def fill(path: Path, count: int = 500) -> None:
    with MessageLog.open(path, LARGE) as log:
        log.append_many([b"%d" % n * 30 for n in range(1, count + 1)], sender="ann@localhost", timestamp_ns=7_000_000)


def test_a_folder_of_segments_is_recognised(tmp_path: Path) -> None:
    fill(tmp_path / "log", 1)
    assert detect(str(tmp_path / "log")) == "messagelog"
    with open_log(str(tmp_path / "log")) as log:
        assert log.format == "messagelog"
        record = log.read(1)[0]
        assert (record.timestamp_ns, record.kind) == (7_000_000, None)
        assert record.extra is not None
        assert (record.extra["seq"], bytes(record.extra["from"])) == (1, b"ann@localhost")  # type: ignore[call-overload]
    with pytest.raises(OptionsError):
        detect(str(tmp_path))


def test_every_position_is_found_through_the_index(tmp_path: Path) -> None:
    fill(tmp_path)
    with MessageLogReader(tmp_path) as log:
        for position in [*range(500, 0, -7), *range(1, 501, 13)]:
            batch = log.read(position, 3)
            assert batch.positions[0] == position
            assert batch.to_payloads()[0] == b"%d" % position * 30


def test_an_index_that_lies_is_found_out(tmp_path: Path) -> None:
    fill(tmp_path)
    path = tmp_path / (segment_name(1) + ".idx")
    good = path.read_bytes()
    for byte in range(12, len(good)):
        path.write_bytes(good[:byte] + bytes([good[byte] ^ 0x15]) + good[byte + 1 :])
        with MessageLogReader(tmp_path) as log:
            for position in (30, 60, 90, 120, 150):
                assert log.read(position, 1).positions.tolist() == [position]
            assert any(problem.file == str(path) for problem in log.verify())


def test_a_log_written_by_another_process_is_followed_across_rolls(tmp_path: Path) -> None:
    code = """
import sys, time
from penstock.log.messagelog import MessageLog, MessageLogOptions
with MessageLog.open(sys.argv[1], MessageLogOptions(segment_bytes=3000)) as log:
    for n in range(1, 401):
        log.append(b"%d" % n * 10)
        if n % 50 == 0:
            time.sleep(0.01)
"""
    MessageLog.open(tmp_path).close()
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=os.environ)
    found: list[int] = []
    with MessageLogReader(tmp_path) as log:
        for batch in log.tail(1, timeout=60):
            found += batch.positions.tolist()
            assert batch.to_payloads() == [b"%d" % n * 10 for n in batch.positions.tolist()]
            if len(found) >= 400:
                break
    assert child.wait(60) == 0
    assert found == list(range(1, 401))


def test_retention_under_a_reader_expires_its_position(tmp_path: Path) -> None:
    options = MessageLogOptions(sync="none", segment_bytes=1000)
    with MessageLog.open(tmp_path, options) as log, MessageLogReader(tmp_path) as reader:
        log.append_many([bytes(100)] * 50)
        held = reader.read(1)
        log.drop_before(40)
        assert held.to_payloads()[0] == bytes(100)  # what was read stays
        assert reader.first_position > 1
        assert reader.read(reader.first_position).positions[0] == reader.first_position


def test_what_retention_takes_under_a_reader_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    options = MessageLogOptions(sync="none", segment_bytes=1000)
    with MessageLog.open(tmp_path, options) as log, MessageLogReader(tmp_path) as reader:
        log.append_many([bytes(100)] * 50)
        assert len(reader.read(45)) > 0  # it knows the segments now, and holds none of the old ones
        log.drop_before(40)
        with pytest.raises(ExpiredError) as caught:
            reader.read(2)
        assert caught.value.first == reader.first_position > 2


def test_damage_in_a_sealed_segment_is_counted_and_reading_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    path = tmp_path / (segment_name(1) + ".log")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    counted = CRC_FAILURES.value()
    with MessageLogReader(tmp_path) as log:
        found = [entry.seq for entry in log.entries()]
        list(log.entries())
        problems = [problem for problem in log.verify() if problem.file == str(path)]
    assert found[-1] == 500
    assert 1 < len(found) < 500
    assert CRC_FAILURES.value() == counted + 1
    assert "damaged" in caplog.text
    assert "checksum" in problems[0].reason
    assert "next intact entry" in problems[0].reason


def test_verify_names_gaps_and_what_is_out_of_order(tmp_path: Path) -> None:
    from penstock import kernel

    with MessageLog.open(tmp_path) as log:
        log.append(b"a")
        log.append(b"b", seq=5)
    path = tmp_path / (segment_name(1) + ".log")
    with path.open("ab") as file:
        file.write(kernel.messagelog.encode_one(3, 0, b"", b"late"))
    with MessageLogReader(tmp_path) as reader:
        assert [str(problem) for problem in reader.verify()] == [
            f"{path} at byte 27: a gap: 2 to 4 are missing",
            f"{path} at byte 54: entry 3 is not above entry 5 before it",
        ]
        assert reader.read(1).positions.tolist() == [1, 5]


def test_verify_names_a_torn_tail(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    path = tmp_path / (segment_name(1) + ".log")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5)
    with MessageLogReader(tmp_path) as reader:
        (problem,) = reader.verify()
        assert problem.file == str(path)
        assert "are left" in problem.reason
        assert reader.read(1).positions.tolist() == [1, 2]


def test_a_recreated_log_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    fill(path, 3)
    with MessageLogReader(path) as reader:
        assert len(reader.read(1)) == 3
        shutil.rmtree(path)
        with pytest.raises(ReplacedError):
            reader.read(4)
        fill(path, 4)
        with pytest.raises(ReplacedError):
            reader.read(4)


def test_a_large_entry_in_the_active_segment_is_read_whole(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path, MessageLogOptions(max_payload_bytes=9 << 20)) as log:
        log.append(b"small")
        log.append(b"L" * (9 << 20))
        log.append(b"after")
        with MessageLogReader(tmp_path) as reader:
            assert [len(entry.payload) for entry in reader.entries()] == [5, 9 << 20, 5]
            assert reader.read(2, 1).positions.tolist() == [2]
            assert reader.next_position == 4


def test_a_closed_reader_says_so(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    reader = MessageLogReader(tmp_path)
    reader.close()
    with pytest.raises(ClosedError):
        reader.read(1)
    with pytest.raises(OptionsError, match="no message log"):
        MessageLogReader(tmp_path / "nowhere")


def test_limits_of_reads(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    with MessageLogReader(tmp_path) as reader:
        assert len(reader.read(1, 0)) == 0
        assert len(reader.read(4)) == 0
        assert reader.read(4).next_position == 4
        assert list(reader.entries(1, 0)) == list(reader.entries(1 << 64)) == list(reader.entries(10**30)) == []
        with pytest.raises(OptionsError, match="2\\^63"):
            reader.read(1 << 63)


def test_single_reads_in_any_order_find_their_entry_while_the_log_grows_and_rolls(tmp_path: Path) -> None:
    rng, options = random.Random(3), MessageLogOptions(sync="none", segment_bytes=20_000)
    with MessageLog.open(tmp_path, options) as log, MessageLogReader(tmp_path) as reader:
        for _ in range(40):
            first = log.next_position
            log.append_many([b"%d" % n * rng.randrange(1, 60) for n in range(first, first + rng.randrange(1, 40))])
            last = log.last_seq
            order = [rng.randrange(1, last + 1) for _ in range(20)]
            order += range(max(last - 20, 1), last + 1)
            for position in order:
                batch = reader.read(position, 1)
                assert batch.positions.tolist() == [position]
                assert batch.to_payloads()[0].startswith(b"%d" % position)
            assert len(reader.read(last + 1, 1)) == 0


class CountingDisk(PosixDisk):
    """A disk that keeps a list of what is asked of it by name."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def list(self, folder: str) -> list[str]:
        self.calls.append("list")
        return super().list(folder)

    def stat(self, path: str) -> Stat | None:
        self.calls.append("stat")
        return super().stat(path)

    def open(self, path: str) -> PosixFile:
        self.calls.append("open")
        return super().open(path)


def test_reading_in_segments_that_are_known_costs_one_look_at_the_file(tmp_path: Path) -> None:
    fill(tmp_path)
    disk = CountingDisk()
    with MessageLogReader(tmp_path, disk) as reader:
        for position in (1, 4, 498):
            reader.read(position, 1)
        for position in (3, 1, 2, 499, 500, 498, 4):  # in a sealed one, which is mapped, or in the last one
            disk.calls.clear()
            assert reader.read(position, 1).positions.tolist() == [position]
            assert disk.calls == ["stat"]


class Numbers(list[int]):
    """Numbers of segments that nobody may walk over."""

    def __iter__(self) -> Any:
        raise AssertionError("a read looks at its segment, and not at all before it")


def test_a_read_does_not_step_over_the_segments_before_it(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log", MessageLogOptions(segment_bytes=200)) as log:
        log.append_many([b"x" * 190] * 50)
    with MessageLogReader(tmp_path / "log") as reader:
        reader._folder.numbers = Numbers(reader._folder.numbers)
        assert [reader.read(number, 1).positions.tolist() for number in (30, 31, 7)] == [[30], [31], [7]]


def test_an_active_segment_that_is_cut_and_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / (segment_name(1) + ".log")
    entry = kernel.messagelog.encode_one
    kept = b"".join(entry(n, 0, b"ann", b"kept %d" % n) for n in range(1, 30))
    path.write_bytes(kept + entry(30, 0, b"ann", b"taken back") + entry(31, 0, b"ann", b"taken back"))
    with MessageLogReader(tmp_path) as reader:
        assert reader.read(30, 1).to_payloads() == [b"taken back"]
        with path.open("r+b") as file:  # as a writer does whose append failed on its way
            file.truncate(len(kept))
        assert len(reader.read(30, 1)) == 0
        assert reader.read(29, 9).to_payloads() == [b"kept 29"]
        with path.open("ab") as file:
            file.write(entry(30, 0, b"ann", b"another") + entry(31, 0, b"ann", b"and one more"))
        assert reader.read(30, 9).to_payloads() == [b"another", b"and one more"]
        with path.open("r+b") as file:  # and while nobody looked
            file.truncate(len(kept))
            file.seek(len(kept))
            file.write(entry(30, 0, b"ann", b"a third, and longer than the others together"))
        assert reader.read(30, 1).to_payloads() == [b"a third, and longer than the others together"]
        assert reader.read(31, 1).to_payloads() == []


def test_entries_of_very_different_sizes_are_read_whole_from_the_active_segment(tmp_path: Path) -> None:
    sizes = [10] * 300 + [200_000] + [10] * 50 + [50_000] * 20 + [0] * 10
    options = MessageLogOptions(sync="none", max_payload_bytes=1 << 20)
    with MessageLog.open(tmp_path, options) as log, MessageLogReader(tmp_path) as reader:
        log.append_many([bytes([n % 256]) * size for n, size in enumerate(sizes)])
        position, found = 1, []
        while len(batch := reader.read(position, 40)):
            found += batch.to_payloads()
            position = batch.next_position
    assert list(map(len, found)) == sizes
    assert all(payload == bytes([n % 256]) * sizes[n] for n, payload in enumerate(found))


# --- Segments that cannot be opened


def barred(code: int) -> FaultyDisk:
    """Three segments of five entries each, of which the second one cannot be opened."""
    disk = FaultyDisk(MemoryDisk())
    with MessageLog.open("log", MessageLogOptions(segment_bytes=150), disk=disk) as log:
        log.append_many([b"entry"] * 15)

    def fail(operation: str, path: str) -> None:
        if operation == "open" and path.endswith("6.log"):
            raise OSError(code, os.strerror(code), path)

    disk.on_call = fail
    return disk


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_segment_that_cannot_be_opened_is_raised_or_counted_as_the_caller_chose(code: int) -> None:
    disk = barred(code)
    assert [name for name in disk.list("log") if name.endswith(".log")][1].endswith("6.log")
    with MessageLogReader("log", disk) as log:
        found = log.read(1).positions.tolist() + log.read(6).positions.tolist()
        assert found == [1, 2, 3, 4, 5, 11, 12, 13, 14, 15]
        assert log.damage_count == 1
        assert "6.log" in str(log.damage[0])
    with MessageLogReader("log", disk, on_damage="raise") as log:
        assert log.read(1).positions.tolist() == [1, 2, 3, 4, 5]
        for _ in range(2):
            with pytest.raises(OSError, match=os.strerror(code)):
                log.read(6)
        onwards, problem = log.skip_damage(6) or (0, None)
        assert onwards == 11
        assert "6.log" in str(problem)
        assert log.read(12).positions.tolist() == [12, 13, 14, 15]
    with open_log("log", disk=disk, on_damage="raise") as opened, pytest.raises(OSError, match=r"6\.log"):
        opened.read(6)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("on_damage", ["skip", "raise"])
def test_a_shortage_is_no_damage(code: int, on_damage: Any) -> None:
    disk = barred(code)
    with MessageLogReader("log", disk, on_damage=on_damage) as log:
        with pytest.raises(OSError, match=os.strerror(code)):
            log.read(6)
        assert log.damage_count == 0
        disk.on_call = None
        assert log.read(6).positions.tolist() == [6, 7, 8, 9, 10]
