"""Promise: who has read a file to its end has missed nothing when it is removed, and goes on in the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ExpiredError
from penstock.fold import Follow, each_record, follow
from penstock.log import open_log
from penstock.log.xchannel import Reader, Writer
from penstock.store import AppendLogStore
from penstock.types import KvUpdate

LAST = each_record(lambda record: KvUpdate.put("k", bytes(record.payload), record.position))


def dropping_writer(path: Path) -> Writer:
    return Writer.open(path, region_bytes=4096, roll_bytes=1 << 30, keep_files=1)


@pytest.mark.parametrize("anew", [False, True])
def test_a_reader_at_the_end_of_a_removed_file_goes_on_in_the_next(tmp_path: Path, anew: bool) -> None:
    path = tmp_path / "chan"
    writer = dropping_writer(path)
    writer.append_many([b"%d" % number for number in range(9)])
    with open_log(str(path)) as log:
        end = log.next_position
        last = int(log.read(log.first_position).positions[-1])
    if anew:  # this one did not see where the file ended
        writer.close()
        writer = dropping_writer(path)
    writer.roll()
    writer.append(b"next")
    writer.close()
    with open_log(str(path)) as log:
        assert log.first_position > end
        assert log.keeps(end)
        assert log.read(end).to_payloads() == [b"next"]
        assert log.gaps(end, log.read(end)) == 0
        assert not log.keeps(last)
        with pytest.raises(ExpiredError):
            log.read(last)
    with Reader.open(path, end) as reader:
        assert [bytes(record.payload) for record in reader.records(timeout=0)] == [b"next"]


def test_a_reader_two_files_behind_has_missed_what_was_between(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with dropping_writer(path) as writer:
        writer.append(b"first")
        with open_log(str(path)) as log:
            end = log.next_position
        writer.roll()
        writer.append(b"missed")
        writer.roll()
    with open_log(str(path)) as log:
        assert not log.keeps(end)
        with pytest.raises(ExpiredError):
            log.read(end)


def test_the_end_of_a_channel_that_is_gone_says_nothing_about_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with dropping_writer(path) as writer:
        writer.append(b"first")
        writer.roll()
    mark = Path(f"{path}.penstock-dropped").read_bytes()
    for name in tmp_path.iterdir():
        name.unlink()
    with dropping_writer(path) as writer:
        writer.append_many([b"other"] * 3)
        writer.roll()
    Path(f"{path}.penstock-dropped").write_bytes(mark)
    with open_log(str(path)) as log, pytest.raises(ExpiredError):
        log.read(104)


async def test_a_fold_that_has_read_everything_outlives_the_file_it_read(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with dropping_writer(path) as writer:
        writer.append(b"one")
        with AppendLogStore.open(tmp_path / "fold") as store:
            with open_log(str(path)) as log:
                await follow(log, store, once=True, to_updates=LAST)
            writer.roll()
            with open_log(str(path)) as log:
                fold = Follow(log, store, to_updates=LAST)
                assert (await fold.step(), fold.lag) == (0, 0)
                writer.append(b"two")
                assert (await fold.step(), fold.lag) == (1, 0)
                fold.close()
