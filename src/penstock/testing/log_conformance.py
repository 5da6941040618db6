"""The suite every log format passes: what LogReader and LogWriter promise, tried on a real folder.

A format's test module subclasses LogConformance and says how to open a writer and a reader:

    class TestMyLog(LogConformance):
        def open_writer(self, path): ...
        def open_reader(self, path): ...

The methods are pytest tests; each is named after the promise it holds.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.batch import Batch
from penstock.errors import ClosedError, ExpiredError, LockedError
from penstock.log.face import LogReader

__all__ = ["LogConformance", "contents", "fingerprints"]


def contents(log: LogReader, limit: int = 1000) -> list[bytes]:
    """Return every payload of a log, read batch by batch."""
    found: list[bytes] = []
    position = log.first_position
    while True:
        batch = log.read(position, limit)
        if not len(batch):
            return found
        found += batch.to_payloads()
        position = batch.next_position


def fingerprints(folder: str) -> dict[str, str]:
    """Return a hash of every file below a folder: what must not change by reading."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


class LogConformance:
    """Subclass it for a format; see the head of this module."""

    payloads: Sequence[bytes] = (b"", b"a", b"hello", bytes(range(256)), b"x" * 3000, *(b"%d" % n for n in range(500)))

    def open_writer(self, path: str) -> Any:
        """Return the format's LogWriter for a log named ``path`` in an existing folder."""
        raise NotImplementedError

    def open_reader(self, path: str) -> LogReader:
        """Return the format's LogReader."""
        raise NotImplementedError

    def test_what_is_appended_is_read_in_order(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        positions = [writer.append(payload) for payload in self.payloads]
        with self.open_reader(path) as log:
            assert contents(log) == list(self.payloads)
            assert log.read(log.first_position).positions.tolist() == positions[: len(log.read(log.first_position))]
        writer.close()

    def test_positions_grow_and_bound_the_log(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        positions = writer.append_many(list(self.payloads))
        assert (np.diff(positions) > 0).all()
        assert positions.dtype == np.int64
        with self.open_reader(path) as log:
            assert log.origin == log.first_position == positions[0]
            assert log.next_position > positions[-1]
            assert len(log.read(log.next_position)) == 0
        writer.close()

    def test_append_many_is_the_same_as_appending_each(self, tmp_path: Path) -> None:
        one, many = str(tmp_path / "one"), str(tmp_path / "many")
        first, second = self.open_writer(one), self.open_writer(many)
        singly = [first.append(payload) for payload in self.payloads]
        together = second.append_many(list(self.payloads))
        assert together.tolist() == singly
        with self.open_reader(one) as a, self.open_reader(many) as b:
            assert contents(a) == contents(b) == list(self.payloads)
        first.close()
        second.close()

    def test_append_many_takes_a_batch_and_an_arrow_array(self, tmp_path: Path) -> None:
        import pyarrow as pa

        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        writer.append_many(Batch.of([b"one", b"two"]))
        writer.append_many(pa.array([b"three", b"four"], pa.binary()))
        writer.append_many(pa.array(["fünf"], pa.large_string()))
        writer.append_many(pa.array([b"skipped", b"six"], pa.binary())[1:])
        writer.append_many(pa.array([b"seven and longer than twelve"], pa.binary_view()))
        writer.append_many([])
        expected = [b"one", b"two", b"three", b"four", "fünf".encode(), b"six", b"seven and longer than twelve"]
        with self.open_reader(path) as log:
            assert contents(log) == expected
        writer.close()

    def test_any_position_can_be_read_from(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        positions = writer.append_many(list(self.payloads)).tolist()
        with self.open_reader(path) as log:
            for index in (len(positions) - 1, 0, len(positions) // 2, 1):
                batch = log.read(positions[index], 2)
                assert batch.to_payloads()[0] == self.payloads[index]
                assert batch.positions[0] == positions[index]
        writer.close()

    def test_reading_goes_on_at_next_position(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        writer.append_many(list(self.payloads))
        with self.open_reader(path) as log:
            assert contents(log, limit=1) == contents(log, limit=7) == list(self.payloads)
            part = log.read(log.first_position, 10)
            cut = len(part) // 2
            assert log.read(part[:cut].next_position, 1).to_payloads() == [part.to_payloads()[cut]]
        writer.close()

    def test_the_limit_is_never_exceeded(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        writer.append_many([b"x"] * 100)
        with self.open_reader(path) as log:
            assert 1 <= len(log.read(log.first_position, 3)) <= 3
        writer.close()

    def test_a_record_is_visible_when_append_returns(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        writer.append(b"first")
        with self.open_reader(path) as log:
            position = log.next_position
            for number in range(50):
                writer.append(b"%d" % number)
                batch = log.read(position)
                assert batch.to_payloads() == [b"%d" % number]
                position = batch.next_position
        writer.close()

    def test_tail_waits_for_what_comes(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        writer.append(b"before")
        found: list[bytes] = []
        log = self.open_reader(path)

        start = log.next_position

        def follow() -> None:
            for batch in log.tail(start, timeout=60):
                found.extend(batch.to_payloads())
                if len(found) == 3:
                    return

        thread = threading.Thread(target=follow)
        thread.start()
        time.sleep(0.05)
        writer.append(b"one")
        writer.append_many([b"two", b"three"])
        thread.join(60)
        assert found == [b"one", b"two", b"three"]
        log.close()
        writer.close()

    def test_tail_with_a_timeout_ends(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        writer.append(b"one")
        with self.open_reader(path) as log:
            assert [batch.to_payloads() for batch in log.tail(log.first_position, timeout=0.05)] == [[b"one"]]
        writer.close()

    def test_a_second_writer_is_refused(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        writer.append(b"mine")
        with pytest.raises(LockedError):
            self.open_writer(path)
        writer.append(b"still mine")
        writer.close()
        again = self.open_writer(path)
        again.append(b"now mine")
        again.close()
        with self.open_reader(path) as log:
            assert contents(log) == [b"mine", b"still mine", b"now mine"]

    def test_positions_go_on_after_a_restart(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        first = writer.append_many([b"1", b"2"])
        writer.close()
        writer = self.open_writer(path)
        assert writer.append(b"3") > first[-1]
        writer.close()
        with self.open_reader(path) as log:
            assert contents(log) == [b"1", b"2", b"3"]
            assert log.read(int(first[1]), 1).to_payloads() == [b"2"]

    def test_sync_names_a_durable_position(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        position = writer.append(b"kept")
        bound = writer.sync()
        assert bound > position
        with self.open_reader(path) as log:
            durable = log.durable_position
            assert durable is None or durable >= bound
        writer.close()

    def test_reading_changes_no_file(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        writer.append_many(list(self.payloads))
        writer.close()
        before = fingerprints(str(tmp_path))
        with self.open_reader(path) as log:
            contents(log)
            list(log.verify())
            log.stat()
            list(log.tail(timeout=0.01))
        assert fingerprints(str(tmp_path)) == before

    def test_a_sound_log_has_no_problems(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        writer.append_many(list(self.payloads))
        writer.close()
        with self.open_reader(path) as log:
            assert list(log.verify()) == []
            assert log.stat()["format"] == log.format

    def test_a_position_below_the_first_has_expired(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        writer.append_many(list(self.payloads))
        self.expire(writer)
        with self.open_reader(path) as log:
            first = log.first_position
            if first > 0:
                with pytest.raises(ExpiredError) as caught:
                    log.read(first - 1)
                assert (caught.value.position, caught.value.first) == (first - 1, first)
        writer.close()

    def expire(self, writer: Any) -> None:
        """Let retention take the oldest records, if the format can in a test."""

    def test_a_closed_writer_says_so(self, tmp_path: Path) -> None:
        writer = self.open_writer(str(tmp_path / "log"))
        writer.append(b"x")
        writer.close()
        writer.close()
        with pytest.raises(ClosedError):
            writer.append(b"y")
        with pytest.raises(ClosedError):
            writer.append_many([b"y"])

    def test_handles_do_not_travel_by_pickle(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        writer.append(b"x")
        with self.open_reader(path) as log:
            for handle in (writer, log):
                with pytest.raises(TypeError, match="open it again"):
                    pickle.dumps(handle)
        writer.close()

    @pytest.mark.filterwarnings("ignore:This process")
    def test_a_handle_does_not_survive_a_fork(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        writer.append(b"parent")
        child = os.fork()
        if child == 0:  # pragma: no cover - the child reports by its exit code
            try:
                writer.append(b"child")
            except ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writer.append(b"parent again")
        with self.open_reader(path) as log:
            assert contents(log) == [b"parent", b"parent again"]
        writer.close()

    def test_a_batch_outlives_its_log(self, tmp_path: Path) -> None:
        path = str(tmp_path / "log")
        writer = self.open_writer(path)
        writer.append_many([b"one", b"two"])
        writer.close()
        log = self.open_reader(path)
        batch = log.read(log.first_position)
        view = batch.payload(1)
        log.close()
        for file in tmp_path.iterdir():
            if file.is_file():
                file.unlink()
        del log
        assert batch.to_payloads() == [b"one", b"two"]
        assert bytes(view) == b"two"
