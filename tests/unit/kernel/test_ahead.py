"""The thread that makes room ahead of a writer: what it did is exactly what it says it did."""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.kernel import Mapping
from penstock.kernel.ahead import Ahead, give_room

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="room is made ahead on Linux only")

PIECE = 1 << 20


@pytest.fixture
def ahead() -> Iterator[Ahead]:
    ahead = Ahead()
    thread = threading.Thread(target=ahead.run)
    thread.start()
    yield ahead
    ahead.end()
    thread.join(60)
    assert not thread.is_alive()


def begun(ahead: Ahead, fd: int, offset: int, window: Mapping, start: int) -> int:
    """Ask until the thread was fast enough to begin; return what it made."""
    while True:
        ahead.ask(fd, offset, window, start, PIECE)
        for _ in range(1000):
            os.sched_yield()
        if (made := ahead.settle()) or os.fstat(fd).st_size != offset:
            return made


def test_the_file_grows_by_zeros_that_can_be_written(tmp_path: Path, ahead: Ahead) -> None:
    with (tmp_path / "file").open("w+b") as file:
        window = Mapping(file.fileno(), 0, 8 * PIECE, True)
        for number in range(3):
            assert begun(ahead, file.fileno(), number * PIECE, window, number * PIECE) in (1, 2)
            assert os.fstat(file.fileno()).st_size == (number + 1) * PIECE
        view = memoryview(window)
        assert not any(view[: 3 * PIECE])
        view[3 * PIECE - 1] = 7
    assert (tmp_path / "file").read_bytes()[-1] == 7


def test_a_file_that_does_not_end_there_is_left_alone(tmp_path: Path, ahead: Ahead) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(PIECE)
        window = Mapping(file.fileno(), 0, 8 * PIECE, True)
        for offset in (0, 2 * PIECE):
            for _ in range(20):
                ahead.ask(file.fileno(), offset, window, offset, PIECE)
                os.sched_yield()
                assert ahead.settle() == 0
        assert os.fstat(file.fileno()).st_size == PIECE


def test_what_cannot_be_had_changes_nothing(tmp_path: Path, ahead: Ahead) -> None:
    path = tmp_path / "file"
    path.touch()
    with path.open("r+b") as file, path.open("rb") as reading:
        window = Mapping(file.fileno(), 0, PIECE, True)
        for _ in range(20):
            ahead.ask(reading.fileno(), 0, window, 0, PIECE)  # not open for writing
            os.sched_yield()
            assert ahead.settle() == 0
    assert path.stat().st_size == 0


def test_a_request_outside_its_window_is_refused(tmp_path: Path, ahead: Ahead) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(PIECE)
        window, reading = (Mapping(file.fileno(), 0, PIECE, writable) for writable in (True, False))
        for bad, start, length in ((window, 4096, PIECE), (window, -1, 1), (window, 0, 0), (reading, 0, PIECE)):
            with pytest.raises(ValueError, match="cannot make room"):
                ahead.ask(file.fileno(), PIECE, bad, start, length)


def descriptors(path: Path) -> int:
    """How many descriptors of this process lead to a file, whether it still has its name or not."""
    found = 0
    for entry in os.scandir("/proc/self/fd"):
        try:
            found += os.readlink(entry.path).removesuffix(" (deleted)") == str(path)
        except FileNotFoundError:
            pass
    return found


def resident(path: Path) -> int:
    """How many KiB of a file this process has mapped."""
    lines, size = Path("/proc/self/smaps").read_text().splitlines(), 0
    for number, line in enumerate(lines):
        if line.removesuffix(" (deleted)").endswith(str(path)):
            size += next(int(field.split()[1]) for field in lines[number:] if field.startswith("Rss:"))
    return size


def eventually(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_what_was_left_is_given_back_and_no_byte_is_lost(tmp_path: Path, ahead: Ahead) -> None:
    path, gone = tmp_path / "file", tmp_path / "gone"
    gone.touch()
    with path.open("w+b") as file, gone.open("rb") as removed:
        assert give_room(file.fileno(), 0, PIECE) == 0
        window = Mapping(file.fileno(), 0, PIECE, True)
        view = memoryview(window)
        view[:] = b"x" * PIECE
        assert resident(path) == PIECE >> 10
        gone.unlink()
        ahead.tidy(window, file.fileno(), removed.fileno())
    assert eventually(lambda: descriptors(path) == descriptors(gone) == 0)
    assert eventually(lambda: resident(path) == 0)
    assert bytes(view) == b"x" * PIECE == path.read_bytes()
    view[5] = 7  # it comes back when it is used
    assert path.read_bytes()[5] == 7


def test_one_is_taken_over_at_a_time_and_none_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w+b") as file:
        file.truncate(PIECE)
        ahead, window = Ahead(), Mapping(file.fileno(), 0, PIECE, True)
        for _ in range(3):
            ahead.tidy(window, file.fileno(), file.fileno())  # nobody is there to do it yet
            assert descriptors(path) == 3
        ahead.end()
        ahead.run()  # what was taken over is still done
        assert descriptors(path) == 1
        ahead.tidy(window, file.fileno())
        assert descriptors(path) == 1


def test_room_comes_before_tidying(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w+b") as file:
        ahead, window = Ahead(), Mapping(file.fileno(), 0, PIECE, True)
        ahead.tidy(window)
        ahead.ask(file.fileno(), 0, window, 0, PIECE)
        thread = threading.Thread(target=ahead.run)
        thread.start()
        assert eventually(lambda: os.fstat(file.fileno()).st_size == PIECE)
        assert ahead.settle() == 2
        ahead.end()
        thread.join(60)
        assert not thread.is_alive()


def test_after_its_end_it_does_nothing(tmp_path: Path) -> None:
    ahead = Ahead()
    ahead.end()
    with (tmp_path / "file").open("w+b") as file:
        ahead.ask(file.fileno(), 0, Mapping(file.fileno(), 0, PIECE, True), 0, PIECE)
        assert ahead.settle() == 0
    ahead.run()  # returns at once


def test_who_looks_while_room_is_given_finds_whole_pieces(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        sizes, done = set(), threading.Event()

        def look() -> None:
            while not done.is_set():
                sizes.add(os.fstat(file.fileno()).st_size)

        thread = threading.Thread(target=look)
        thread.start()
        assert eventually(lambda: bool(sizes))
        for number in range(50):
            assert give_room(file.fileno(), number * PIECE, PIECE) == 0
        done.set()
        thread.join()
        assert {size % PIECE for size in sizes} == {0}


def test_room_that_cannot_be_had_changes_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"here")
        file.flush()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE, hard))
            assert give_room(file.fileno(), 4, 2 * PIECE) == errno.EFBIG
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "file").read_bytes() == b"here"
