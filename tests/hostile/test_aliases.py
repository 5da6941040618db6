"""Promise: what is owned is the data, whatever name it is reached by, and whatever became of the lock beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from owners import OWNERS, Owner

from penstock.channels import ChannelManager
from penstock.disk import PosixDisk
from penstock.errors import LockedError, OptionsError, PenstockError
from penstock.log.xchannel import Reader, Writer
from penstock.mqtt.state_open import KeptBroker
from penstock.node.node import take_data

owners = pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.name)


def begin(owner: Owner, path: Path) -> Any:
    first = owner.open(path)
    owner.use(first, 1)
    return first


def refused(owner: Owner, path: Path) -> None:
    with pytest.raises(LockedError):
        owner.open(path)


@owners
def test_a_second_owner_by_the_same_name_is_refused(owner: Owner, tmp_path: Path) -> None:
    first = begin(owner, tmp_path / "data")
    refused(owner, tmp_path / "data")
    owner.use(first, 2)
    first.close()
    owner.open(tmp_path / "data").close()


@owners
def test_a_second_owner_through_a_symbolic_link_is_refused(owner: Owner, tmp_path: Path) -> None:
    first = begin(owner, tmp_path / "data")
    (tmp_path / "alias").symlink_to(tmp_path / "data")
    refused(owner, tmp_path / "alias")
    owner.use(first, 2)
    first.close()


@owners
def test_a_second_owner_through_a_linked_folder_above_is_refused(owner: Owner, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    first = begin(owner, tmp_path / "alias" / "data")
    refused(owner, tmp_path / "real" / "data")
    first.close()
    begin(owner, tmp_path / "real" / "data").close()


@owners
def test_a_second_owner_through_hard_links_is_refused(owner: Owner, tmp_path: Path) -> None:
    if owner.name == "rocksdb":
        pytest.skip("RocksDB never writes to a file that it did not make itself: linked copies are its checkpoints")
    first = begin(owner, tmp_path / "data")
    alias = tmp_path / "alias"
    if owner.folder:
        shutil.copytree(tmp_path / "data", alias, copy_function=os.link)
        for lock in owner.locks(alias):
            lock.unlink()
    else:
        os.link(tmp_path / "data", alias)
    refused(owner, alias)
    owner.use(first, 2)
    first.close()


@owners
def test_a_removed_lock_lets_nobody_in(owner: Owner, tmp_path: Path) -> None:
    first = begin(owner, tmp_path / "data")
    locks = owner.locks(tmp_path / "data")
    assert locks, "it has no lock to remove"
    for lock in locks:
        lock.unlink(missing_ok=True)
    refused(owner, tmp_path / "data")
    owner.use(first, 2)
    first.close()
    owner.open(tmp_path / "data").close()


@owners
def test_another_process_is_refused_without_the_lock_too(owner: Owner, tmp_path: Path) -> None:
    first = begin(owner, tmp_path / "data")
    for lock in owner.locks(tmp_path / "data"):
        lock.unlink(missing_ok=True)
    code = (
        "import sys, pathlib; from owners import OWNERS\n"
        "from penstock.errors import LockedError\n"
        "owner = next(o for o in OWNERS if o.name == sys.argv[1])\n"
        "try: owner.open(pathlib.Path(sys.argv[2]))\n"
        "except LockedError: print('refused')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, owner.name, str(tmp_path / "data")],
        cwd=Path(__file__).parents[1] / "support", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.stdout.strip() == "refused", run.stderr
    first.close()


@owners
def test_the_child_of_a_fork_owns_nothing_and_keeps_nothing(owner: Owner, tmp_path: Path) -> None:
    first = begin(owner, tmp_path / "data")
    told, tell = os.pipe()
    wait, go = os.pipe()
    child = os.fork()
    if not child:  # nothing here may return to pytest
        code = 1
        try:
            os.close(go)
            try:
                owner.use(first, 9)
            except PenstockError:
                code = 0
            os.write(tell, b"1")
            os.read(wait, 1)
        finally:
            os._exit(code)
    os.close(tell)
    os.close(wait)
    assert os.read(told, 1) == b"1"
    refused(owner, tmp_path / "data")  # it is still the parent's
    first.close()
    again = owner.open(tmp_path / "data")  # though the child lives
    owner.use(again, 2)
    again.close()
    os.close(go)
    os.close(told)
    assert os.waitpid(child, 0)[1] == 0


def meet(open_one: Callable[[], Any]) -> list[Any]:
    """Let eight threads open something at the same moment; return who got it, and what all others were told."""
    barrier = threading.Barrier(8)

    def attempt() -> Any:
        barrier.wait()
        try:
            return open_one()
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(8) as pool:
        answers = [future.result() for future in [pool.submit(attempt) for _ in range(8)]]
    others = [answer for answer in answers if isinstance(answer, Exception)]
    assert [type(other) for other in others if not isinstance(other, LockedError)] == [], others
    return [answer for answer in answers if not isinstance(answer, Exception)]


@owners
@pytest.mark.parametrize("made", [False, True], ids=["new", "there"])
def test_of_threads_that_open_at_once_one_is_the_owner(owner: Owner, made: bool, tmp_path: Path) -> None:
    if made:
        begin(owner, tmp_path / "data").close()
    for _ in range(3):
        (first,) = meet(lambda: owner.open(tmp_path / "data"))
        owner.use(first, 2)
        first.close()


@owners
def test_the_data_that_is_a_link_is_not_written_to(owner: Owner, tmp_path: Path) -> None:
    """Of a file that is a log; a folder may be reached through a link, and is owned itself."""
    if owner.folder:
        pytest.skip("a folder that is reached through a link is owned itself")
    begin(owner, tmp_path / "data").close()
    before = (tmp_path / "data").read_bytes()
    (tmp_path / "alias").symlink_to(tmp_path / "data")
    with pytest.raises(OptionsError, match="symbolic link"):
        owner.open(tmp_path / "alias")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with contextlib.suppress(OptionsError, OSError):
        owner.open(tmp_path / "dangling").close()
    assert (tmp_path / "data").read_bytes() == before
    assert not (tmp_path / "nothing").exists()


# --- Those that own a folder of other things


class Held:
    """Something that is closed by letting go of it."""

    def __init__(self, close: Any) -> None:
        self.close = close


def open_node(path: Path) -> Held:
    return Held(take_data(str(path)).release)


def open_broker(path: Path) -> Held:
    loop = asyncio.new_event_loop()
    try:
        kept = KeptBroker(str(path), loop=loop)
    except BaseException:
        loop.close()
        raise
    return Held(lambda: (kept.close(), loop.close()))


def open_manager(path: Path) -> Held:
    loop = asyncio.new_event_loop()
    try:
        manager = loop.run_until_complete(ChannelManager.open(path))
    except BaseException:
        loop.close()
        raise
    return Held(lambda: (loop.run_until_complete(manager.close()), loop.close()))


folders = pytest.mark.parametrize("opening", [open_node, open_broker, open_manager], ids=lambda one: one.__name__)


@folders
def test_of_threads_that_open_a_folder_at_once_one_is_the_owner(opening: Any, tmp_path: Path) -> None:
    for _ in range(3):
        (first,) = meet(lambda: opening(tmp_path / "data"))
        first.close()


@folders
def test_the_child_of_a_fork_keeps_no_folder(opening: Any, tmp_path: Path) -> None:
    forks_and_lets_go(lambda: opening(tmp_path / "data"))


def named_reader(path: Path) -> Any:
    return Reader.open(path / "ticks", name="one")


def plain_lock(path: Path) -> Any:
    return Held(PosixDisk().lock(str(path / "lock"), of=str(path)).release)


def latch(path: Path) -> Any:
    taken = PosixDisk().latch(str(path / "lock"))
    if not taken.take():
        raise LockedError("lock")
    return Held(taken.close)


@pytest.mark.parametrize("opening", [named_reader, plain_lock, latch], ids=lambda one: one.__name__)
def test_the_child_of_a_fork_keeps_no_lock(opening: Any, tmp_path: Path) -> None:
    with Writer.open(tmp_path / "ticks") as writer:
        writer.append(b"1")
    forks_and_lets_go(lambda: opening(tmp_path))


def forks_and_lets_go(open_one: Callable[[], Any]) -> None:
    first = open_one()
    told, tell = os.pipe()
    wait, go = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(go)
            os.write(tell, b"1")
            os.read(wait, 1)
        finally:
            os._exit(0)
    os.close(tell)
    assert os.read(told, 1) == b"1"
    os.close(told)
    os.close(wait)
    try:
        with pytest.raises(LockedError):
            open_one()
        first.close()
        open_one().close()  # though the child lives
    finally:
        os.close(go)
        os.waitpid(child, 0)


@pytest.mark.parametrize("alias", ["the same name", "a link", "a folder above", "no lock"])
@folders
def test_a_second_owner_of_a_folder_is_refused(opening: Any, alias: str, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path = tmp_path / "real" / "data"
    first = opening(path)
    other = path
    if alias == "a link":
        other = tmp_path / "alias"
        other.symlink_to(path)
    elif alias == "a folder above":
        (tmp_path / "alias").symlink_to(tmp_path / "real")
        other = tmp_path / "alias" / "data"
    elif alias == "no lock":
        locks = [lock for lock in path.rglob("*lock*") if lock.is_file()]
        assert locks
        for lock in locks:
            lock.unlink()
    with pytest.raises(LockedError):
        opening(other)
    first.close()
    opening(path).close()
