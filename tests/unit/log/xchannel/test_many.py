"""Many channels in one folder: each is found by a listing, and none of them reads the folder for itself alone."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Reader, Writer
from penstock.disk import PosixDisk, listing
from penstock.errors import CorruptionError, NotFoundError
from penstock.log.detect import open_log
from penstock.log.xchannel.files import discover

MANY = 300  # with three names each more than a folder may have whose names are not remembered


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every listing that is made; each takes a tenth of a second on a clock that stands still otherwise."""
    clock, made, real = [0.0], [], PosixDisk.list

    def spy(disk: PosixDisk, folder: str) -> list[str]:
        made.append(folder)
        clock[0] += 0.1
        return real(disk, folder)

    monkeypatch.setattr(PosixDisk, "list", spy)
    monkeypatch.setattr(listing.time, "monotonic", lambda: clock[0])  # type: ignore[attr-defined]
    listing._listings.clear()
    yield made
    listing._listings.clear()


def fill(folder: Path, count: int = MANY) -> list[str]:
    paths = [str(folder / f"channel-{number:03}") for number in range(count)]
    for path in paths:
        with Writer.open(path, region_bytes=4096, roll_bytes=8192, sync="none") as writer:
            writer.append(b"one")
    return paths


def write_files(path: str, count: int) -> None:
    """Add to a channel until it has so many files."""
    with Writer.open(path, region_bytes=4096, roll_bytes=8192, sync="none") as writer:
        for _ in range(8 * count):
            if not os.path.exists(f"{path}.{count - 1}"):
                writer.append(bytes(1000))


def settle(folder: Path) -> None:
    """As if the folder had been left alone for a while."""
    before = time.time_ns() - 60 * 10**9
    os.utime(folder, ns=(before, before))


def numbers_of(path: str) -> Any:
    return discover(PosixDisk(), path)


def test_making_and_opening_many_channels_reads_their_folder_a_few_times(tmp_path: Path, listings: list[str]) -> None:
    paths = fill(tmp_path, MANY)
    few = listing.FEW_NAMES // 3 * 8  # while it has few names it is read each time
    assert len(listings) < few + 20
    made = len(listings)
    for path in paths:
        with Writer.open(path) as writer:
            writer.append(b"two")
    assert len(listings) < made + 20
    settle(tmp_path)
    made = len(listings)
    for path in paths:
        with Reader.open(path) as reader:
            assert bytes(reader.read().payload) == b"one"
        with open_log(path) as log:
            assert len(log.read(log.first_position)) == 2
    assert len(listings) < made + 3


def test_a_file_that_came_or_went_since_the_folder_was_read_is_seen(tmp_path: Path, listings: list[str]) -> None:
    paths = fill(tmp_path)
    assert numbers_of(paths[0]) == numbers_of(paths[1]) == [0]
    write_files(paths[1], 2)
    assert numbers_of(paths[1]) == [0, 1]
    os.remove(paths[1])
    assert numbers_of(paths[1]) == [1]
    shutil.copy(paths[0], paths[1])
    assert numbers_of(paths[1]) == [0, 1]
    os.remove(paths[1])
    os.remove(paths[1] + ".1")
    assert numbers_of(paths[1]) == []
    shutil.copy(paths[0], paths[1] + ".7")
    assert numbers_of(paths[1]) == [7]


def test_no_channel_is_said_to_be_missing_or_made_anew_on_what_was_remembered(
    tmp_path: Path, listings: list[str]
) -> None:
    paths = fill(tmp_path)
    numbers_of(paths[0])
    lost = str(tmp_path / "later")
    with pytest.raises(NotFoundError):
        Reader.open(lost)
    shutil.copy(paths[0], lost + ".5")  # a channel whose older files are gone, as restored from elsewhere
    shutil.copy(paths[0] + ".penstock-id", lost + ".penstock-id")
    assert numbers_of(lost) == [5]
    Writer.open(lost).close()
    assert not os.path.exists(lost)


def test_a_hole_in_the_numbers_is_seen_in_a_folder_that_was_remembered(tmp_path: Path, listings: list[str]) -> None:
    paths = fill(tmp_path)
    write_files(paths[5], 4)
    assert numbers_of(paths[5]) == [0, 1, 2, 3]
    os.remove(paths[5] + ".1")
    assert numbers_of(paths[5]) == [0, 2, 3]
    with Reader.open(paths[5]) as reader, pytest.raises(CorruptionError):
        list(iter(reader.try_read, None))


def test_what_was_remembered_is_not_trusted_while_the_folder_could_change_unseen(
    tmp_path: Path, listings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(listing.FEW_NAMES + 1):
        (tmp_path / f"name-{number:04}").touch()
    disk = PosixDisk()
    assert listing.names_from(disk, str(tmp_path), "name-0007") == (["name-0007"], True)
    assert listing.names_from(disk, str(tmp_path), "name-0007") == (["name-0007"], False)  # changed a moment ago
    settle(tmp_path)
    listing.names_from(disk, str(tmp_path), "name", again=True)
    assert listing.names_from(disk, str(tmp_path), "name-0007") == (["name-0007"], True)
    (tmp_path / "name-0007-b").touch()
    assert listing.names_from(disk, str(tmp_path), "name-0007") == (["name-0007"], False)
    monkeypatch.setattr(listing.time, "monotonic", lambda: 1e9)  # type: ignore[attr-defined]
    assert listing.names_from(disk, str(tmp_path), "name-0007") == (["name-0007", "name-0007-b"], True)


def test_the_names_of_a_few_folders_are_remembered(tmp_path: Path, listings: list[str]) -> None:
    for folder in range(listing.MOST_FOLDERS + 3):
        (tmp_path / str(folder)).mkdir()
        for number in range(listing.FEW_NAMES + 1):
            (tmp_path / str(folder) / str(number)).touch()
        listing.names_from(PosixDisk(), str(tmp_path / str(folder)), "7")
    assert len(listing._listings) == listing.MOST_FOLDERS
