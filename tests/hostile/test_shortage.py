"""Promise: without threads to be had everything is done once; a full disk is an answer, and then it goes on.

For what stands on the logs and stores: queues with helpers of their own, groups, channels, buckets, folds, artifacts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock.disk.executor as executor
from penstock.artifact import export_store, import_artifact
from penstock.channels import ChannelManager, ManagerOptions
from penstock.disk import PosixDisk
from penstock.errors import PenstockError, Refused
from penstock.fold import Follow
from penstock.kv import EmbeddedConnection
from penstock.log.detect import open_log
from penstock.log.envelope import CONTENT, encode_envelopes
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.store import AppendLogStore, open_store
from penstock.testing.faulty import FaultyDisk
from penstock.types import KvUpdate, WatchCursor

ANN = "ann@localhost"


class NoThreads:
    """Stands in the place of Thread.start, and lets none start."""

    def __get__(self, thread: threading.Thread, kind: type) -> Callable[[], None]:
        raise RuntimeError("can't start new thread")


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """A block in which no thread can be started, and none is there to work."""
    executor._executor.cache_clear()
    executor._waiting.cache_clear()

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", NoThreads())
            yield

    yield block
    executor._executor.cache_clear()
    executor._waiting.cache_clear()


def test_a_queue_that_compresses_and_flushes_needs_no_thread(shortage: Any, tmp_path: Path) -> None:
    options = ChannelOptions(sync="interval", segment_bytes=300, compression="gzip", flush_seconds=0.01)
    with shortage():
        channel = FileChannel.open(tmp_path / "jobs", options)
        for number in range(60):
            channel.append(b"%04d" % number + bytes(50))
        channel.sync()
    for number in range(60, 70):
        channel.append(b"%04d" % number)
    channel.flush()
    found = [int(p[:4]) for batch in channel.rx().batches(timeout=0) for p in batch.to_payloads()]
    assert found == list(range(70))
    channel.close()


def test_a_group_without_a_thread_for_heartbeats_hands_out_every_message(shortage: Any, tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "jobs", ChannelOptions(sync="none")) as channel:
        channel.append_many([b"%d" % number for number in range(6)])
        group = channel.group("workers")
        with shortage():
            taken = [group.take(timeout=0) for _ in range(3)]
            for job in taken:
                job.ack()
        taken += [group.take(timeout=0) for _ in range(3)]
        assert [bytes(job.payload) for job in taken] == [b"%d" % number for number in range(6)]
        group.close()


def run(scene: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(scene(), 60))  # type: ignore[arg-type]


def test_channels_buckets_and_folds_need_no_thread(shortage: Any, tmp_path: Path) -> None:
    async def channels() -> list[int]:
        async with await ChannelManager.open(tmp_path / "data") as manager:
            ops = manager.channel("ops")
            with contextlib.suppress(Refused):  # the second time
                await ops.join(ANN)
            await ops.configure(ANN, persist=True)
            numbers = list(await asyncio.gather(*[ops.broadcast(ANN, b"%d" % n) for n in range(5)]))
            assert [entry.seq for entry in await ops.history(ANN)][-5:] == numbers
            return numbers

    async def bucket() -> list[str]:
        async with EmbeddedConnection(tmp_path / "kv") as connection:
            made = await connection.make("b")
            for number in range(5):
                await made.writer.put(f"k{number}", b"v" * 100_000)
            return await made.reader.keys()

    with shortage():
        assert run(channels) == [1, 2, 3, 4, 5]
        assert run(bucket) == [f"k{number}" for number in range(5)]
        with AppendLogStore.open(tmp_path / "fold") as store:
            store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
            export_store(store, tmp_path / "artifact")
        import_artifact(tmp_path / "artifact", tmp_path / "imported")
    assert run(channels) == [6, 7, 8, 9, 10]
    with open_store(tmp_path / "imported") as store:
        assert store.count() == 1


CODES = [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ENOMEM]


class Once:
    """Fails the n-th call of the disk that makes or changes something."""

    CHANGES = ("create", "modify", "write_at", "write_many_at", "truncate", "rename", "sync", "sync_folder", "own")

    def __init__(self, after: int, code: int) -> None:
        self.left, self._code = after, code

    def __call__(self, operation: str, path: str) -> None:
        if operation in self.CHANGES:
            self.left -= 1
            if self.left == -1:
                raise OSError(self._code, os.strerror(self._code), path)


@pytest.mark.parametrize("code", CODES)
def test_every_call_of_a_manager_fails_once(code: int, tmp_path: Path, long_run: bool) -> None:
    """What was acknowledged is in the history, in order and once, whatever failed; afterwards it works again."""

    async def scene(folder: Path, fault: Once) -> bool:
        disk = FaultyDisk(PosixDisk())
        acked: list[bytes] = []
        answers = 0
        with contextlib.suppress(OSError, PenstockError):
            manager = await ChannelManager.open(folder, ManagerOptions(segment_bytes=200), disk=disk)
            ops = manager.channel("ops")
            await ops.join(ANN)
            await ops.configure(ANN, persist=True)
            disk.on_call = fault
            for number in range(8):
                with contextlib.suppress(OSError, PenstockError):
                    await ops.broadcast(ANN, b"%03d" % number + bytes(20))
                    acked.append(b"%03d" % number)
                answers += 1
            disk.on_call = None
            with contextlib.suppress(OSError, PenstockError):
                await manager.close()
        async with await ChannelManager.open(folder) as manager:
            ops = manager.channel("ops")
            last = await ops.broadcast(ANN, b"999")
            found = [(entry.seq, entry.payload[:3]) for entry in await ops.history(ANN, 1, 100)]
        assert answers == 8
        assert [payload for _, payload in found if payload in acked or payload == b"999"] == [*acked, b"999"], found
        assert [seq for seq, _ in found] == sorted({seq for seq, _ in found})
        assert last == found[-1][0]
        return fault.left >= 0

    for after in range(0, 200, 1 if long_run else 3):
        if run(lambda after=after: scene(tmp_path / f"d{after}", Once(after, code))):  # type: ignore[misc]
            return
    pytest.fail("it takes more than 200 calls")


@pytest.mark.parametrize("code", CODES)
def test_every_call_of_a_fold_fails_once(code: int, tmp_path: Path, long_run: bool) -> None:
    """A fold of a log waits for what comes back, or ends with an error: its store is never ahead of its cursor."""
    with MessageLog.open(tmp_path / "log", MessageLogOptions(content=CONTENT)) as log:
        log.append_many(encode_envelopes([b"k%d" % n for n in range(20)], [b"v%d" % n for n in range(20)]))
    for after in range(0, 60, 1 if long_run else 4):
        disk, path = FaultyDisk(PosixDisk()), str(tmp_path / f"fold{after}")
        fault = disk.on_call = Once(after, code)
        with contextlib.suppress(OSError, PenstockError), AppendLogStore.open(path, disk=disk) as store:
            run(lambda store=store: once(tmp_path / "log", store))  # type: ignore[misc]
        disk.on_call = None
        with AppendLogStore.open(path, disk=disk) as store:
            run(lambda store=store: once(tmp_path / "log", store))  # type: ignore[misc]
            assert {entry.key: entry.value for entry in store.range()} == {f"k{n}": b"v%d" % n for n in range(20)}
        if fault.left >= 0:
            return


async def once(path: Path, store: AppendLogStore) -> None:
    """Fold what there is, and stop."""
    with open_log(str(path)) as log:
        fold = Follow(log, store)
        try:
            await fold.run(once=True)
        finally:
            fold.close()
