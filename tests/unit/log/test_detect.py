"""Promise: a path is opened as what it is, and what is no log is said to be none."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from penstock.disk import MemoryDisk
from penstock.errors import OptionsError, PenstockError
from penstock.log import detect, open_log
from penstock.log.detect import FORMATS, open_writer
from penstock.log.xchannel import Writer


def test_a_channel_is_found_by_its_path_and_after_its_first_file_is_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "chan")
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"a")
        assert detect(path) == "xchannel"
        writer.roll()
    (tmp_path / "chan").unlink()
    assert detect(path) == "xchannel"
    with open_log(path) as log:
        assert log.format == "xchannel"
        assert log.first_position == (1 << 40) + 80


def test_nothing_a_store_and_an_unknown_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="there is nothing here"):
        detect(str(tmp_path / "none"))
    (tmp_path / "store").write_bytes(b"PGSS....")
    with pytest.raises(OptionsError, match="not a log of a known format"):
        detect(str(tmp_path / "store"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionsError, match="not a log of a known format"):
        detect(str(tmp_path / "empty"))


def test_a_format_can_be_given_and_must_be_known(tmp_path: Path) -> None:
    Writer.precreate(tmp_path / "chan")
    with open_log(str(tmp_path / "chan"), format="xchannel") as log:
        assert log.path == str(tmp_path / "chan")
    with pytest.raises(OptionsError, match="format 'zip': must be one of"):
        open_log(str(tmp_path / "chan"), format="zip")
    assert "xchannel" in FORMATS


def test_it_looks_on_the_disk_it_is_given() -> None:
    disk = MemoryDisk()
    with Writer.open("chan", disk=disk) as writer:
        writer.append(b"in memory")
    with open_log("chan", disk=disk) as log:
        assert log.read(80).to_payloads() == [b"in memory"]


@pytest.mark.parametrize("format", ["xchannel", "messagelog", "filechannel"])
def test_a_limit_or_position_that_is_larger_than_any_is_answered(format: str, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    with open_writer(path, format=format) as writer:
        writer.append_many([b"one", b"two", b"three"])
    with open_log(path) as log:
        for limit in ((1 << 40), (1 << 63) - 1, 1 << 70):
            assert log.read(log.first_position, limit).to_payloads() == [b"one", b"two", b"three"]
        for position in ((1 << 63) - 1, 1 << 63, 1 << 70):
            for look in (lambda at: len(log.read(at)), lambda at: len(list(log.tail(at, timeout=0.0)))):
                with contextlib.suppress(PenstockError):
                    assert look(position) == 0


@pytest.mark.parametrize("format", ["xchannel", "messagelog", "filechannel"])
def test_a_position_that_is_none_is_told_and_one_of_numpy_is_taken(format: str, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    with open_writer(path, format=format) as writer:
        writer.append_many([b"one", b"two", b"three"])
    with open_log(path) as log:
        second = log.read(log.first_position).positions[1]
        assert log.read(second).to_payloads() == [b"two", b"three"]
        assert log.skip_damage(second) is None
        for wrong in (float("nan"), 1.5):
            for look in (log.read, log.skip_damage):
                with pytest.raises((TypeError, OptionsError), match=r"integer|position"):
                    look(wrong)  # type: ignore[arg-type]
        for wrong in (-1, 1 << 63, 1 << 64):
            for look in (log.read, log.skip_damage):
                with contextlib.suppress(PenstockError):
                    assert not look(wrong)
