"""Finding every log below a folder, and cutting one into spans without reading it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.disk import PosixDisk
from penstock.disk.posix import PosixFile
from penstock.errors import ExpiredError, OptionsError
from penstock.log.detect import open_log, open_writer
from penstock.log.find import find_logs
from penstock.log.sidecar import identity_of
from penstock.log.xchannel import Writer, XChannelLog


def test_a_tree_is_searched_and_names_are_relative_to_it(tmp_path: Path) -> None:
    for name in ("a", "site/b", "site/deep/c.1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Writer.precreate(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not a log at all, and longer than a header" * 4)
    (tmp_path / ".hidden").mkdir()
    Writer.precreate(tmp_path / ".hidden" / "d")
    assert [log.name for log in find_logs(str(tmp_path))] == ["a", "site/b", "site/deep/c.1"]
    assert [log.name for log in find_logs(str(tmp_path / "site" / "b"))] == ["b"]


def test_a_rolled_channel_is_one_log_also_when_its_first_file_has_expired(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "ticks", region_bytes=4096, roll_bytes=8192, keep_files=2) as writer:
        for _ in range(5):
            writer.append(b"x")
            writer.roll()
    assert not (tmp_path / "ticks").exists()
    assert [log.name for log in find_logs(str(tmp_path))] == ["ticks"]


def test_a_file_that_readers_of_another_channel_go_on_in_is_no_log_of_its_own(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "ticks", region_bytes=4096) as writer:
        writer.append(b"x")
    Writer.precreate(tmp_path / "ticks.1")  # its header says that it is the first file of something
    Writer.precreate(tmp_path / "ticks.x")
    assert [log.name for log in find_logs(str(tmp_path))] == ["ticks", "ticks.x"]


def test_nothing_there_is_said(tmp_path: Path) -> None:
    assert find_logs(str(tmp_path)) == []
    with pytest.raises(OptionsError, match="nothing here"):
        find_logs(str(tmp_path / "absent"))
    with pytest.raises(OptionsError, match="must be one of"):
        find_logs(str(tmp_path), format="kafka")


def test_a_recreated_log_has_another_identity(tmp_path: Path) -> None:
    path = str(tmp_path / "ticks")
    open_writer(path).close()
    first = identity_of(PosixDisk(), path)
    for file in tmp_path.iterdir():
        file.unlink()
    open_writer(path).close()
    assert first
    assert identity_of(PosixDisk(), path) not in ("", first)


@pytest.mark.parametrize("roll_bytes", [0, 10_000])
@pytest.mark.parametrize("span_bytes", [1, 4096, 9000, 40_000, 1 << 30])
def test_the_spans_of_a_cut_hold_every_record_once(tmp_path: Path, roll_bytes: int, span_bytes: int) -> None:
    path = str(tmp_path / "ticks")
    with Writer.open(path, region_bytes=4096, roll_bytes=roll_bytes) as writer:
        positions = [writer.append(b"%d" % number * (number % 300 + 1)) for number in range(400)]
        log = XChannelLog(path)
        start, end = positions[3], log.next_position
        spans = log.cut(start, end, span_bytes)
        cuts = [begin for begin, _ in spans]
        writer.append_many([b"later" * 100] * 100)
    assert spans == log.cut(start, end, span_bytes)  # what was appended behind the end changes nothing
    assert cuts[0] == start
    assert cuts == sorted(set(cuts))
    assert cuts[-1] < end
    found: list[int] = []
    for low, high in zip(cuts, [*cuts[1:], end], strict=True):
        with open_log(path) as part:
            at = low
            while at < high:
                batch = part.read(at, 7)
                found += [position for position in batch.positions.tolist() if position < high]
                at = batch.next_position
    assert found == positions[3:]
    assert log.cut(end, end, span_bytes) == []
    if span_bytes == 9000:
        assert len(cuts) > 5
        assert all(9000 <= size < 9000 + 2 * 4096 for _, size in spans[:-1])
    log.close()


def test_hidden_names_are_passed_over_and_those_that_only_look_like_a_sidecar_are_not(tmp_path: Path) -> None:
    for name in ("ticks", ".ticks.x7Hq2a", "penstock-data/ticks"):  # the second is what a copy under way looks like
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Writer.precreate(tmp_path / name)
    assert [log.name for log in find_logs(str(tmp_path))] == ["penstock-data/ticks", "ticks"]


class RacingDisk(PosixDisk):
    """Does what another process might, just before the first file or folder of these names is looked into."""

    def __init__(self, name: str, meanwhile: Callable[[], object]) -> None:
        self.name, self.meanwhile = name, meanwhile

    def open(self, path: str) -> PosixFile:
        self._race(path)
        return super().open(path)

    def list(self, folder: str) -> list[str]:
        self._race(folder)
        return super().list(folder)

    def _race(self, path: str) -> None:
        if os.path.basename(path) == self.name:
            self.name = ""
            self.meanwhile()


def test_a_channel_is_found_although_retention_takes_what_was_listed(tmp_path: Path) -> None:
    def roll(count: int) -> None:
        with Writer.open(tmp_path / "ticks", region_bytes=4096, roll_bytes=8192, keep_files=1) as writer:
            writer.append_many([b"x" * 1000] * count)

    roll(50)
    before = {path.name for path in tmp_path.glob("ticks.*") if path.suffix[1:].isdigit()}
    (listed,) = before
    disk = RacingDisk(listed, lambda: roll(50))
    assert [log.name for log in find_logs(str(tmp_path), disk=disk)] == ["ticks"]
    assert not disk.name
    assert not (tmp_path / listed).exists()


def test_a_folder_that_is_removed_while_it_is_searched_is_no_log(tmp_path: Path) -> None:
    Writer.precreate(tmp_path / "ticks")
    open_writer(str(tmp_path / "queue"), format="filechannel").close()
    disk = RacingDisk("queue", lambda: shutil.rmtree(tmp_path / "queue"))
    assert [log.name for log in find_logs(str(tmp_path), disk=disk)] == ["ticks"]
    assert not disk.name


def test_a_file_that_retention_takes_while_it_is_cut_is_left_to_whoever_reads_it(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "ticks", region_bytes=4096, roll_bytes=8192) as writer:
        writer.append_many([b"x" * 1000] * 50)
    log = XChannelLog(str(tmp_path / "ticks"), RacingDisk("ticks", (tmp_path / "ticks").unlink))
    spans = log.cut(80, log.next_position, 1)
    assert spans[0][0] == 80
    with pytest.raises(ExpiredError):
        log.read(80)
    log.close()
