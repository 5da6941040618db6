"""What the writer of a message log promises."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.batch import Batch
from penstock.disk import MemoryDisk
from penstock.errors import ExpiredError, OptionsError, ReadOnlyError, UnsupportedError
from penstock.log.messagelog import MessageLog, MessageLogOptions, MessageLogReader
from penstock.log.messagelog.format import index_capacity, segment_name
from penstock.testing.faulty import FaultyDisk

SMALL = MessageLogOptions(sync="none", segment_bytes=600)
ONE = b"x" * 100  # 126 bytes an entry, so a small segment holds five


def seqs(path: Path | str, from_seq: int = 1, limit: int = 10_000, disk: Any = None) -> list[int]:
    with MessageLogReader(path, disk) as log:
        return [entry.seq for entry in log.entries(from_seq, limit)]


def test_an_entry_on_disk_is_the_one_drawn_in_format(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path) as log:
        log.append(b"hi!", sender="ann@localhost", timestamp_ms=1767225600000, seq=7)
    assert (tmp_path / "00000000000000000007.log").read_bytes().hex(" ") == (
        "07 00 00 00 00 00 00 00 00 a8 da 76 9b 01 00 00 0d 00 03 00 00 00 "
        "61 6e 6e 40 6c 6f 63 61 6c 68 6f 73 74 68 69 21 6c 02 92 9d"
    )
    assert (tmp_path / "00000000000000000007.idx").read_bytes() == bytes(393228)


def test_numbers_begin_with_1_and_an_empty_log_has_none(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path) as log:
        assert (log.first_seq, log.last_seq, log.next_position) == (0, 0, 1)
        with MessageLogReader(tmp_path) as reader:
            assert (reader.first_position, reader.next_position, len(reader.read(1))) == (1, 1, 0)
            with pytest.raises(ExpiredError):
                reader.read(0)
        assert log.append(b"first") == 1
        assert (log.first_seq, log.last_seq) == (1, 1)


@pytest.mark.parametrize("seq", [0, -1, 5, 4, 1 << 64])
def test_numbers_that_do_not_grow_are_refused(seq: int, tmp_path: Path) -> None:
    with MessageLog.open(tmp_path) as log:
        log.append(b"x", seq=5)
        with pytest.raises(OptionsError, match="seq="):
            log.append(b"y", seq=seq)
        with pytest.raises(OptionsError, match="seq="):
            log.append_many([b"y"], seq=seq)
        assert log.last_seq == 5
    assert seqs(tmp_path) == [5]


def test_the_largest_sender_and_payload_are_taken_and_larger_ones_refused(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path, MessageLogOptions(max_payload_bytes=1000)) as log:
        log.append(b"p" * 1000, sender=b"s" * 510)
        for payload, sender in ((b"p" * 1001, b""), (b"", b"s" * 511)):
            with pytest.raises(OptionsError, match=r"payload|sender"):
                log.append(payload, sender=sender)
            with pytest.raises(OptionsError, match=r"payload|sender"):
                log.append_many([b"fine", payload], sender=sender)
            with pytest.raises(OptionsError, match=r"payload|sender"):
                log.append_many(Batch.of([b"fine", payload]), sender=[b"", sender])
        assert log.last_seq == 1


def test_what_is_no_text_and_no_bytes_is_no_sender(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path) as log:
        for sender in (5, [1, 2]):  # bytes(5) would be five zeros
            with pytest.raises(TypeError):
                log.append(b"", sender=sender)  # type: ignore[arg-type]
        assert log.last_seq == 0


def test_a_kind_is_not_dropped_in_silence(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path) as log:
        with pytest.raises(OptionsError, match="kind"):
            log.append(b"x", kind=3)
        with pytest.raises(OptionsError, match="kind"):
            log.append_many([b"x"], kind=3)


def test_a_batch_brings_its_senders_and_times(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with MessageLog.open(one) as log:
        log.append_many([b"a", b"b"], sender=["ann@x.io", "bob@x.io"], timestamp_ns=[1_000_000, 2_000_000])
    with MessageLogReader(one) as reader, MessageLog.open(two) as log:
        log.append_many(reader.read(1))
    with MessageLogReader(two) as reader:
        found = [(e.timestamp_ms, e.sender, e.payload) for e in reader.entries()]
    assert found == [(1, b"ann@x.io", b"a"), (2, b"bob@x.io", b"b")]


def test_append_many_takes_views_and_one_sender_for_each(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path) as log:
        assert log.append_many([b"a", memoryview(b"bb"), bytearray(b"c")], sender="ann").tolist() == [1, 2, 3]
        assert log.append_many([b"d"], sender=["bob"], seq=np.array([9])).tolist() == [9]
        with pytest.raises(OptionsError, match="sender has 1"):
            log.append_many([b"e", b"f"], sender=["bob"])
        with pytest.raises(OptionsError, match="must grow"):
            log.append_many([b"e", b"f"], seq=[20, 20])
        with pytest.raises(OptionsError, match="one number"):
            log.append_many([b"e", b"f"], seq=[20])
    with MessageLogReader(tmp_path) as reader:
        assert [(e.sender, e.payload) for e in reader.entries()] == [
            (b"ann", b"a"), (b"ann", b"bb"), (b"ann", b"c"), (b"bob", b"d"),
        ]  # fmt: skip


def test_a_full_segment_is_sealed_with_its_index_cut(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path, SMALL) as log:
        for _ in range(12):
            log.append(ONE)
    names = sorted(path.name for path in tmp_path.glob("0*"))
    assert names == [segment_name(n) + end for n in (1, 6, 11) for end in (".idx", ".log")]
    assert (tmp_path / (segment_name(1) + ".idx")).stat().st_size == 12
    assert seqs(tmp_path) == list(range(1, 13))
    assert seqs(tmp_path, 4, 4) == [4, 5, 6, 7]  # across a roll


def test_the_index_has_an_entry_about_every_4096_bytes(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path, MessageLogOptions(sync="none", segment_bytes=40_000)) as log:
        log.append_many([bytes(1000)] * 20)
        log.append_many([bytes(1000)] * 30)
    data = (tmp_path / (segment_name(1) + ".idx")).read_bytes()
    index = np.frombuffer(data, np.dtype([("seq", "<u4"), ("at", "<u8")]))
    assert index["at"].tolist()[:4] == [0, 4104, 8208, 12312]
    assert index["seq"].tolist()[:4] == [0, 4, 8, 12]


def test_bytes_since_the_last_index_entry_go_on_after_a_restart(tmp_path: Path) -> None:
    steps = [tmp_path / "at-once", tmp_path / "in-steps"]
    options = MessageLogOptions(sync="none")
    with MessageLog.open(steps[0], options) as log:
        for _ in range(30):
            log.append(bytes(700), timestamp_ms=1)
    for _ in range(10):
        with MessageLog.open(steps[1], options) as log:
            for _ in range(3):
                log.append(bytes(700), timestamp_ms=1)
    for ending in (".log", ".idx"):
        files = [(folder / (segment_name(1) + ending)).read_bytes() for folder in steps]
        assert files[0] == files[1]


def test_retention_by_count_drops_whole_segments_and_never_the_active_one(tmp_path: Path) -> None:
    options = MessageLogOptions(sync="none", segment_bytes=600, max_messages=7)
    with MessageLog.open(tmp_path, options) as log:
        for _ in range(40):
            log.append(ONE)
            assert log.last_seq - log.first_seq < 7 + 5
        assert (log.first_seq, log.last_seq) == (31, 40)
        log.append_many([ONE] * 100)
        assert log.last_seq - log.first_seq < 7 + 5
    with MessageLogReader(tmp_path) as reader:
        with pytest.raises(ExpiredError) as caught:
            reader.read(3)
        assert caught.value.first == reader.first_position > 100


def test_in_fifo_mode_only_drop_before_drops_and_keeps_the_last_segment(tmp_path: Path) -> None:
    options = MessageLogOptions(sync="none", segment_bytes=600, retention="fifo", max_messages=1)
    with MessageLog.open(tmp_path, options) as log:
        log.append_many([ONE] * 12)
        assert log.first_seq == 1
        assert log.drop_before(6) == 1
        assert log.first_seq == 6
        assert log.drop_before(1000) == 1
        assert (log.first_seq, log.last_seq) == (11, 12)
    assert seqs(tmp_path) == [11, 12]


def test_numbers_go_on_when_everything_was_dropped(tmp_path: Path) -> None:
    options = MessageLogOptions(sync="none", segment_bytes=100, retention="fifo")
    with MessageLog.open(tmp_path, options) as log:
        log.append_many([ONE] * 3)  # each fills a segment: the active one is empty
        assert log.drop_before(4) == 3
    with MessageLog.open(tmp_path, options) as log:
        assert log.append(ONE) == 4


def test_retention_can_change_while_the_log_is_open(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path, SMALL) as log:
        log.append_many([ONE] * 12)
        log.set_retention("count", 2)
        log.append(ONE)
        assert log.first_seq == 11
        with pytest.raises(OptionsError):
            log.set_retention("lifo")  # type: ignore[arg-type]


def test_delete_empties_the_log_and_its_numbers_go_on(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path, SMALL) as log:
        log.append_many([ONE] * 12)
        with MessageLogReader(tmp_path) as reader:
            assert len(reader.read(1)) > 0
            log.delete()
            assert (log.first_seq, log.last_seq) == (0, 0)
            assert list(tmp_path.glob("0*")) == []
            assert (reader.first_position, reader.next_position) == (13, 13)
            with pytest.raises(ExpiredError):
                reader.read(5)
            with pytest.raises(OptionsError, match="given out"):
                log.append(b"again", seq=12)
            assert log.append(b"again") == 13
            assert reader.read(13).to_payloads() == [b"again"]
        log.delete()
    with MessageLog.open(tmp_path, SMALL) as log:
        assert log.append(b"restarted") == 14


def test_durable_lags_until_a_sync(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path, SMALL) as log:
        log.append(b"x")
        assert log.durable_position is None
        assert log.sync() == 2
        log.append(b"y")
        assert log.durable_position == 2
        assert seqs(tmp_path) == [1, 2]  # what is not durable is readable all the same
    with MessageLogReader(tmp_path) as reader:
        assert reader.durable_position == 2


def test_within_the_interval_an_entry_becomes_durable(tmp_path: Path) -> None:
    options = MessageLogOptions(sync="interval", sync_seconds=0.01)
    with MessageLog.open(tmp_path, options) as log, MessageLogReader(tmp_path) as reader:
        log.append(b"x")
        deadline = time.monotonic() + 60
        while reader.durable_position != 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert reader.durable_position == 2


def test_a_number_that_was_durable_is_never_given_out_again(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path, MessageLogOptions(sync="always")) as log:
        log.append_many([b"a", b"b", b"c"])
    path = tmp_path / (segment_name(1) + ".log")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 3)  # the newest entry is lost
    with MessageLog.open(tmp_path) as log:
        assert log.last_seq == 2
        assert log.append(b"d") == 4
    (tmp_path / "penstock-mark").unlink()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 3)
    with MessageLog.open(tmp_path) as log:  # without the mark it is as with the original
        assert log.append(b"d") == 3


def test_several_threads_append_without_loss(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path, MessageLogOptions(sync="interval", segment_bytes=5000)) as log:
        found: list[int] = []

        def work(name: bytes) -> None:
            for n in range(50):
                found.append(log.append(name * 20))
                found.extend(log.append_many([name] * 3).tolist())
                if n % 10 == 0:
                    log.sync()

        threads = [threading.Thread(target=work, args=(b"%d" % n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == list(range(1, 801))
    assert seqs(tmp_path) == list(range(1, 801))


def test_a_failed_write_leaves_no_trace_and_the_log_goes_on() -> None:
    disk = FaultyDisk(MemoryDisk())
    with MessageLog.open("log", SMALL, disk=disk) as log:
        log.append(b"one")
        disk.fail("write_at", OSError(errno.ENOSPC, "No space left on device"), path=".log")
        with pytest.raises(OSError, match="No space"):
            log.append(b"two")
        assert log.append(b"two again") == 2
    assert seqs("log", disk=disk) == [1, 2]


def test_a_failed_sync_stops_the_log_until_it_is_reopened() -> None:
    disk = FaultyDisk(MemoryDisk())
    log = MessageLog.open("log", MessageLogOptions(sync="always"), disk=disk)
    log.append(b"one")
    disk.fail("sync", OSError(errno.EIO, "Input/output error"), path=".log")
    with pytest.raises(OSError, match="Input/output"):
        log.append(b"two")
    assert log.durable_position == 2
    with pytest.raises(ReadOnlyError, match="sync failed"):
        log.append(b"three")
    log.close()
    with MessageLog.open("log", disk=disk) as log:
        assert log.append(b"three") == 3


def test_a_failed_index_write_costs_only_the_index() -> None:
    disk = FaultyDisk(MemoryDisk())
    with MessageLog.open("log", SMALL, disk=disk) as log:
        disk.fail("write_at", OSError(errno.EIO, "Input/output error"), path=".idx")
        log.append_many([ONE] * 8)
    assert seqs("log", disk=disk) == list(range(1, 9))
    MessageLog.open("log", SMALL, disk=disk).close()
    with MessageLogReader("log", disk) as reader:
        assert list(reader.verify()) == []


def test_numbers_above_all_positions_are_kept_and_named(tmp_path: Path) -> None:
    top = (1 << 63) - 2
    with MessageLog.open(tmp_path) as log:
        log.append(b"below", seq=top)
        with pytest.raises(UnsupportedError, match="2\\^63"):
            log.append_many([b"a", b"b"])
        assert log.append(b"above") == top + 1
        assert log.append(b"last", seq=(1 << 64) - 1) == (1 << 64) - 1
        with pytest.raises(UnsupportedError, match="used up"):
            log.append(b"none left")
    assert seqs(tmp_path) == [top, top + 1, (1 << 64) - 1]
    with MessageLogReader(tmp_path) as reader:
        assert reader.read(1 + reader.first_position - 1).to_payloads() == [b"below"]
        with pytest.raises(UnsupportedError, match="no position"):
            reader.read(top + 1)
        with pytest.raises(UnsupportedError, match="2\\^63"):
            _ = reader.next_position
        assert reader.stat()["last_seq"] == (1 << 64) - 1
        assert reader.stat()["next_position"] is None


def test_a_file_of_the_name_the_next_segment_takes_is_set_aside(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path, SMALL) as log:
        log.append_many([ONE] * 4)
        (tmp_path / (segment_name(6) + ".log")).write_bytes(b"somebody else's")
        log.append_many([ONE] * 4)
    assert seqs(tmp_path) == list(range(1, 9))
    (kept,) = tmp_path.glob("*.bad")
    assert kept.read_bytes() == b"somebody else's"


def test_a_log_cannot_be_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OptionsError, match="is a file"):
        MessageLog.open(tmp_path / "file")


@pytest.mark.parametrize(
    "wrong",
    [{"segment_bytes": 0}, {"max_payload_bytes": 1 << 32}, {"max_messages": -1}, {"retention": "x"}, {"sync": "x"}],
)
def test_contradictions_fail_at_construction(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionsError):
        MessageLogOptions(**wrong)


def test_the_index_of_an_active_segment_is_as_large_as_it_can_get() -> None:
    assert index_capacity(128 << 20) == 393228
    assert index_capacity(700) == 12


FULL = """
import resource, signal, sys
from penstock.log.messagelog import MessageLog, MessageLogOptions
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = MessageLog.open(sys.argv[1], MessageLogOptions(sync="none"))
first = log.append(b"x" * 74)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
try:
    while True:
        log.append(b"x" * 74)
except OSError as exc:
    print(log.last_seq, exc.strerror)
try:
    log.append_many([b"y" * 74] * 10)
except OSError as exc:
    print(log.last_seq, exc.strerror)
"""


def test_a_full_disk_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "log")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "4000 File too large\n4000 File too large\n"
    with MessageLog.open(tmp_path / "log") as log:
        assert log.repairs == []  # the half-written entries were taken back at once
        assert log.append(b"room again") == 4001
    assert seqs(tmp_path / "log") == list(range(1, 4002))
