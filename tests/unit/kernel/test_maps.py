"""Promise: a mapping reaches past the end of its file if need be, is refused where it makes no sense, and cleans up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.kernel.maps import Mapping
from penstock.kernel.twin.maps import Mapping as TwinMapping

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def fd(tmp_path: Path) -> int:
    path = tmp_path / "file"
    path.write_bytes(b"a" * PAGE + b"b" * PAGE)
    return os.open(path, os.O_RDWR)


def test_both_kinds_show_the_same_bytes(fd: int) -> None:
    for kind in (Mapping, TwinMapping):
        window = kind(fd, PAGE, PAGE)
        assert len(window) == window.length == PAGE
        assert bytes(memoryview(window)[:3]) == b"bbb"
        with pytest.raises(TypeError):
            memoryview(window)[0] = 1
    os.close(fd)


def test_a_mapping_grows_with_its_file(fd: int) -> None:
    window = Mapping(fd, 0, 64 * PAGE)
    os.pwrite(fd, b"later", 10 * PAGE)
    assert bytes(memoryview(window)[10 * PAGE : 10 * PAGE + 5]) == b"later"
    os.close(fd)


def test_what_makes_no_sense_is_refused(fd: int) -> None:
    for offset, length in ((1, PAGE), (-PAGE, PAGE), (0, 0), (0, -1)):
        with pytest.raises(ValueError, match="cannot map"):
            Mapping(fd, offset, length)
    window = Mapping(fd, 0, 2 * PAGE, True)
    for start, stop in ((-1, 5), (5, 4), (0, 2 * PAGE + 1)):
        with pytest.raises(ValueError, match="cannot sync"):
            window.sync(start, stop)
        with pytest.raises(ValueError, match="cannot populate"):
            window.populate(start, stop)
    window.sync(0, 2 * PAGE)
    window.sync(100, 100)
    assert window.populate(5, 6) in (True, False)
    with pytest.raises(ValueError, match="reading only"):
        TwinMapping(fd, 0, PAGE, True)
    os.close(fd)
    with pytest.raises(OSError):
        Mapping(fd, 0, PAGE)


def test_a_view_keeps_the_mapping(fd: int) -> None:
    view = memoryview(Mapping(fd, 0, PAGE))[:4]
    os.close(fd)
    assert bytes(view) == b"aaaa"
