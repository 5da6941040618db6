"""Promise: whatever call fails, there is an answer; nothing acknowledged is lost; afterwards it works again.

Every call of the disk seam fails once, in turn, while each kind of owner is opened, written to, synced, rolled or
compacted, and closed.  What an owner acknowledged must be there at the end, in order and once.  The real thing is tried
as well: no descriptors left, no thread to be had.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from owners import OWNERS, Owner

from penstock.disk import MemoryDisk, PosixDisk
from penstock.errors import PenstockError, ReadOnlyError
from penstock.log.detect import open_log
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.log.xchannel import Writer
from penstock.store import AppendLogOptions, AppendLogStore
from penstock.testing.faulty import FaultyDisk
from penstock.types import KvUpdate, WatchCursor

Disk = Any


@dataclass(frozen=True)
class Kind:
    """How one kind of log or store is driven."""

    name: str
    open: Callable[[Disk, str], Any]
    write: Callable[[Any, int], Any]
    settle: Callable[[Any], Any]
    shake: Callable[[Any], Any]
    read: Callable[[Disk], list[int]]


def put(store: AppendLogStore, number: int) -> None:
    store.apply([KvUpdate.put(f"{number:03}", b"v", number)], WatchCursor.of(number + 1))


def stored(disk: Disk) -> list[int]:
    with AppendLogStore.open("log", disk=disk, read_only=True) as store:
        return [int(key) for key in store.keys()]  # noqa: SIM118 - no dict


def logged(disk: Disk) -> list[int]:
    with open_log("log", disk=disk) as log:
        position, found = log.first_position, []
        while len(batch := log.read(position)):
            found += [int(payload) for payload in batch.to_payloads()]
            position = batch.next_position
        return found


KINDS = [
    Kind(
        "xchannel",
        lambda disk, sync: Writer.open("log", region_bytes=4096, sync=sync, sync_seconds=0.001, disk=disk),
        lambda writer, number: writer.append(b"%03d" % number),
        lambda writer: writer.sync(),
        lambda writer: writer.roll(),
        logged,
    ),
    Kind(
        "append-log",
        lambda disk, sync: AppendLogStore.open("log", AppendLogOptions(sync=sync, sync_seconds=0.001), disk=disk),
        put,
        lambda store: store.settle(),
        lambda store: store.compact(),
        stored,
    ),
    Kind(
        "filechannel",
        lambda disk, sync: FileChannel.open("log", ChannelOptions(sync=sync, sync_seconds=0.001), disk=disk),
        lambda channel, number: channel.tx().send(b"%03d" % number),
        lambda channel: channel.sync(),
        lambda channel: channel.rotate(),
        logged,
    ),
    Kind(
        "messagelog",
        lambda disk, sync: MessageLog.open(
            "log", MessageLogOptions(sync=sync, sync_seconds=0.001, segment_bytes=70), disk=disk
        ),
        lambda log, number: log.append(b"%03d" % number),
        lambda log: log.sync(),
        lambda log: None,
        logged,
    ),
]

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


class Fault:
    """Fails one call of the disk."""

    def __init__(self, after: int, code: int) -> None:
        self.left, self._code, self._thread = after, code, threading.get_ident()

    def __call__(self, operation: str, path: str) -> None:
        self.left -= 1
        if self.left == -1:
            raise OSError(self._code, os.strerror(self._code), path)


def run(kind: Kind, disk: FaultyDisk, sync: str) -> tuple[list[int], list[int]]:
    """Drive an owner through its life; return what it acknowledged, and what it refused."""
    acked: list[int] = []
    refused: list[int] = []
    handle: Any = None
    steps: list[Callable[[], Any]] = []

    def write(number: int) -> None:
        try:
            kind.write(handle, number)
        except (OSError, PenstockError):
            refused.append(number)
            raise
        acked.append(number)

    steps = [
        lambda: write(0),
        lambda: write(1),
        lambda: kind.settle(handle),
        lambda: kind.shake(handle),
        lambda: write(2),
        lambda: kind.settle(handle),
        lambda: write(3),
        lambda: handle.close(),  # noqa: PLW0108 - it is another one by then
    ]
    for step in steps:
        if handle is None:
            with contextlib.suppress(OSError, PenstockError):
                handle = kind.open(disk, sync)
            if handle is None:
                handle = kind.open(disk, sync)  # one call failed: now it must work
        try:
            step()
        except ReadOnlyError:
            with contextlib.suppress(OSError, PenstockError):
                handle.close()
            handle = None  # as the error says
        except (OSError, PenstockError):
            pass
    if handle is not None:
        with contextlib.suppress(OSError, PenstockError):
            handle.close()
    return acked, refused


@pytest.mark.parametrize("sync", ["none", "interval", "always"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ENOMEM])
@kinds
def test_every_call_fails_once(kind: Kind, code: int, sync: str, long_run: bool) -> None:
    step = 1 if long_run else 3 if sync == "interval" else 2
    for after in range(0, 200, step):
        disk = FaultyDisk(MemoryDisk())
        fault = disk.on_call = Fault(after, code)
        acked, refused = run(kind, disk, sync)
        disk.on_call = None
        with kind.open(disk, sync) as again:  # the shortage is over
            kind.write(again, 9)
        found = kind.read(disk)
        assert [number for number in found if number not in refused] == [*acked, 9], (after, acked, refused, found)
        assert found == sorted(found), (after, found)
        assert len(set(found)) == len(found) or refused, (after, found)
        if fault.left >= 0:
            return
    pytest.fail("a life takes more than 200 calls")


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """No descriptor can be had in the block; nor does a collection of what earlier tests left give some back."""
    gc.collect()
    gc.disable()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(used + 2 - len(os.listdir("/proc/self/fd")))]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held, default=used) + 1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in held:
            os.close(fd)
        gc.enable()


@pytest.mark.parametrize("owner", [owner for owner in OWNERS if owner.name != "rocksdb"], ids=lambda o: o.name)
def test_without_descriptors_there_is_an_answer_and_afterwards_it_works(owner: Owner, tmp_path: Path) -> None:
    path = tmp_path / "data"
    opened = owner.open(path)
    owner.use(opened, 1)
    opened.close()
    with no_descriptors(), pytest.raises((OSError, PenstockError)):
        owner.open(path)
    again = owner.open(path)
    owner.use(again, 2)
    with no_descriptors(), contextlib.suppress(OSError, PenstockError):
        owner.use(again, 3)
    with contextlib.suppress(ReadOnlyError):
        owner.use(again, 4)
    again.close()
    owner.open(path).close()


class NoThreads:
    """Stands in the place of Thread.start, and lets none start."""

    def __get__(self, thread: threading.Thread, kind: type) -> Callable[[], None]:
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("sync", ["interval", "always"])
@kinds
def test_without_threads_everything_is_acknowledged_and_there(
    kind: Kind, sync: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import penstock.disk.commit as commit

    group = commit.GroupCommit()  # one that has no thread yet
    for module in ("penstock.log.xchannel.durable", "penstock.store.appendlog", "penstock.log.messagelog.writer"):
        monkeypatch.setattr(f"{module}.GROUP", group)
    monkeypatch.setattr("penstock.log.filechannel.spool.GROUP", group)
    monkeypatch.chdir(tmp_path)
    disk = PosixDisk()
    with monkeypatch.context() as shortage:
        shortage.setattr(threading.Thread, "start", NoThreads())
        handle = kind.open(disk, sync)
        for number in range(50):
            kind.write(handle, number)
        kind.settle(handle)
        handle.close()
    assert kind.read(disk) == list(range(50))
    with kind.open(disk, sync) as handle:
        kind.write(handle, 50)
    assert kind.read(disk) == list(range(51))


class FailingSync:
    """Fails every sync of a file, and says when one did."""

    def __init__(self) -> None:
        self.failed = threading.Event()

    def __call__(self, operation: str, path: str) -> None:
        if operation == "sync":
            self.failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)


@pytest.mark.parametrize("teller", ["write", "settle", "close"])
@kinds
def test_a_sync_that_failed_in_the_background_is_told_by_whatever_comes_next(kind: Kind, teller: str) -> None:
    disk = FaultyDisk(MemoryDisk())
    handle = kind.open(disk, "interval")
    kind.write(handle, 0)
    kind.settle(handle)
    fault = disk.on_call = FailingSync()
    kind.write(handle, 1)
    assert fault.failed.wait(60)
    with pytest.raises((OSError, PenstockError), match="Input/output error"):
        {"write": lambda: kind.write(handle, 2), "settle": lambda: kind.settle(handle), "close": handle.close}[teller]()
    with contextlib.suppress(OSError, PenstockError):
        handle.close()
    disk.on_call = None
    with kind.open(disk, "interval") as again:
        kind.write(again, 9)
    assert kind.read(disk)[0] == 0
    assert kind.read(disk)[-1] == 9


@kinds
def test_the_last_write_before_threads_can_be_had_again_is_durable(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.disk.commit as commit

    group = commit.GroupCommit()
    for module in ("xchannel.durable", "messagelog.writer", "filechannel.spool"):
        monkeypatch.setattr(f"penstock.log.{module}.GROUP", group)
    monkeypatch.setattr("penstock.store.appendlog.GROUP", group)
    disk = FaultyDisk(MemoryDisk())
    with monkeypatch.context() as shortage:
        shortage.setattr(threading.Thread, "start", NoThreads())
        handle = kind.open(disk, "interval")
        kind.write(handle, 0)
    disk.cut_power()
    with contextlib.suppress(OSError, PenstockError):
        handle.close()
    assert kind.read(disk) == [0]
