"""Promise: several writers share a message log in turns, and the log is as if one had written it."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from penstock.disk import MemoryDisk
from penstock.disk.turns import TURNS_IN_A_ROW
from penstock.errors import ClosedError, ReplacedError, Timeout
from penstock.log.messagelog import MessageLog, MessageLogOptions, MessageLogReader
from penstock.log.messagelog.shared import SharedLog

SMALL = MessageLogOptions(sync="none", segment_bytes=9000)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3000), max_size=8)), max_size=25))
def test_writers_in_turns_leave_the_bytes_one_writer_leaves(turns: list[tuple[int, list[int]]]) -> None:
    disk, alone = MemoryDisk(), MemoryDisk()
    writers = [SharedLog.open("log", SMALL, disk=disk) for _ in range(3)]
    single = MessageLog.open("log", SMALL, disk=alone)
    numbers = itertools.count(1)
    # All of them know the first segment: who comes later recovers, as every opening does, and that takes away a last
    # segment without entries.
    for who, sizes in [(0, [1]), (1, []), (2, []), *turns]:
        payloads = [b"x" * size for size in sizes]
        with writers[who].turn():
            assert writers[who].next_position == single.next_position
            found = [writers[who].append(payload, timestamp_ms=5) for payload in payloads]
        assert found == list(itertools.islice(numbers, len(payloads)))
        for payload in payloads:
            single.append(payload, timestamp_ms=5)
    for writer in writers:
        writer.close()
    single.close()
    names = [name for name in alone.list("log") if not name.startswith("penstock-")]
    assert [name for name in disk.list("log") if not name.startswith("penstock-")] == names
    for name in names:
        theirs, ours = (d.open(f"log/{name}").read_at(0, 1 << 20) for d in (alone, disk))
        assert ours == theirs, name


def test_a_torn_entry_of_a_dead_writer_is_cut_by_the_next_turn(tmp_path: Path) -> None:
    one, two = SharedLog.open(tmp_path / "log"), SharedLog.open(tmp_path / "log")
    with one.turn():
        one.append(b"whole")
    segment = tmp_path / "log" / "00000000000000000001.log"
    with segment.open("ab") as file:  # what a kill in the middle of a write leaves
        file.write((2).to_bytes(8, "little") + bytes(8) + b"\0\0\x40\0\0\0abc")
    with two.turn():
        assert two.append(b"next") == 2
    with one.turn():
        assert one.next_position == 3
    with MessageLogReader(tmp_path / "log") as log:
        assert log.read(1).to_payloads() == [b"whole", b"next"]
        assert list(log.verify()) == []
    one.close()
    two.close()


def test_a_turn_ends_with_timeout_when_another_keeps_the_lock(tmp_path: Path) -> None:
    one, two = SharedLog.open(tmp_path / "log"), SharedLog.open(tmp_path / "log")
    with one.turn(), pytest.raises(Timeout), two.turn(0.05):
        pass
    with two.turn(0.05):
        two.append(b"now")
    one.close()
    two.close()


def test_a_turn_on_a_recreated_log_is_refused(tmp_path: Path) -> None:
    log = SharedLog.open(tmp_path / "log")
    with log.turn():
        log.append(b"old")
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(ReplacedError), log.turn():
        pass
    with MessageLog.open(tmp_path / "log") as other:
        other.append(b"new")
    with pytest.raises(ReplacedError), log.turn():
        pass


def test_a_lock_that_was_removed_is_not_taken_in_vain(tmp_path: Path) -> None:
    one = SharedLog.open(tmp_path / "log")
    with one.turn():
        one.append(b"first")
    for name in ("penstock-lock", "penstock-queue"):
        (tmp_path / "log" / name).unlink()  # as people do with lock files that look forgotten
    two = SharedLog.open(tmp_path / "log")
    with two.turn():
        two.append(b"second")
        with pytest.raises(Timeout), one.turn(0.02):
            pass
    with one.turn():
        assert one.append(b"third") == 3
        with pytest.raises(Timeout), two.turn(0.02):
            pass
    one.close()
    two.close()


@pytest.mark.filterwarnings("ignore:This process")
def test_the_child_of_a_fork_leaves_a_turn_to_its_parent(tmp_path: Path) -> None:
    one, two = SharedLog.open(tmp_path / "log"), SharedLog.open(tmp_path / "log")
    with one.turn():
        pid = os.fork()
        if pid == 0:
            try:
                one.end_turn()
                with one.turn():
                    os._exit(1)
            except ClosedError:
                os._exit(0)
            except BaseException:  # pytest must not go on in here
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with pytest.raises(Timeout), two.turn(0.02):
            pass
        assert one.append(b"mine") == 1
    with two.turn():
        assert two.append(b"theirs") == 2
    one.close()
    two.close()


def test_threads_of_one_process_take_turns_too(tmp_path: Path) -> None:
    log = SharedLog.open(tmp_path / "log", SMALL)

    def work() -> None:
        for _ in range(100):
            with log.turn():
                log.append(b"%d" % log.next_position)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    with MessageLogReader(tmp_path / "log") as reader:
        found: list[bytes] = []
        while len(batch := reader.read(len(found) + 1)):
            found += batch.to_payloads()
    assert found == [b"%d" % n for n in range(1, 301)]


def test_who_waits_for_a_turn_is_let_past_after_a_few(tmp_path: Path) -> None:
    busy, other = SharedLog.open(tmp_path / "log", SMALL), SharedLog.open(tmp_path / "log", SMALL)
    done = threading.Event()

    def work() -> None:
        with other.turn():
            done.set()

    for had in (1, TURNS_IN_A_ROW, TURNS_IN_A_ROW + 3):
        done.clear()
        for _ in range(had - 1):
            with busy.turn():
                pass
        with busy.turn():
            thread = threading.Thread(target=work)
            thread.start()
            while busy._lock._line.take():  # until it stands in the queue
                busy._lock._line.release()
        more = 0
        while not done.is_set():
            with busy.turn():
                more += not done.is_set()
        thread.join()
        assert more <= TURNS_IN_A_ROW
    busy.close()
    other.close()


def test_a_writer_in_a_loop_lets_another_have_its_turns(tmp_path: Path) -> None:
    busy, other = SharedLog.open(tmp_path / "log", SMALL), SharedLog.open(tmp_path / "log", SMALL)
    done = threading.Event()
    taken = 0
    lined_up: list[int] = []  # how many turns the busy one had had when the other stood in the queue
    take = other._lock._line.take

    def noted() -> bool:
        if got := take():
            lined_up.append(taken)
        return got

    other._lock._line.take = noted  # type: ignore[method-assign]

    def work() -> None:
        nonlocal taken
        while not done.is_set():
            with busy.turn():
                busy.append(b"again")
            taken += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(50):
            lined_up.clear()
            with other.turn():
                assert not lined_up or taken - lined_up[0] <= TURNS_IN_A_ROW + 1  # one was under way
                other.append(b"me too")
    finally:
        done.set()
        thread.join()
    busy.close()
    other.close()


def test_a_sync_beside_a_drop_of_everything_gives_no_number_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = SharedLog.open(tmp_path / "log", SMALL), SharedLog.open(tmp_path / "log", SMALL)
    with one.turn():
        one.append(b"first")
    remove = two._files.remove

    def meanwhile(number: int) -> None:
        one.sync()  # outside of a turn, as it is done every second; the segment it knows is still there
        remove(number)

    with two.turn():
        two.append(b"x" * 4000)
        end = two.append(b"x" * 6000) + 1  # the segment is full: the next one has no entry yet
        monkeypatch.setattr(two._files, "remove", meanwhile)
        assert two.drop_before(end) == 1
    three = SharedLog.open(tmp_path / "log", SMALL)
    for log in (three, one, two):
        with log.turn():
            assert log.next_position == end
    again = SharedLog.open(tmp_path / "log", SMALL)  # the one before has not written anything
    with again.turn():
        assert again.append(b"next") == end
    for log in (one, two, three, again):
        log.close()
