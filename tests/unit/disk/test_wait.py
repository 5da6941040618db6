"""Promise: a waiter looks often at first, seldom later, and keeps to its time."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.disk import Backoff, FolderWait, LoopWait, MemoryDisk, PosixDisk
from penstock.disk.inotify import FolderWatch
from penstock.log import aio
from penstock.log.detect import open_log, open_writer
from penstock.log.filechannel import FileChannel
from penstock.log.xchannel import Reader, Writer


def test_the_delays_double_up_to_the_longest() -> None:
    backoff = Backoff()
    delays = [backoff.delay() for _ in range(12)]
    assert delays[0] == 50e-6
    assert all(b == min(2 * a, 10e-3) for a, b in itertools.pairwise(delays))
    assert delays[-1] == 10e-3
    assert backoff.delay(remaining=0.001) == 0.001
    assert backoff.delay(remaining=-1) == 0
    backoff.reset()
    assert backoff.delay() == 50e-6


def test_wait_ends_when_it_is_ready_or_out_of_time() -> None:
    looks = iter([False] * 5 + [True])
    assert Backoff().wait(lambda: next(looks))
    began = time.monotonic()
    assert Backoff().wait(lambda: False, timeout=0.02) is False
    assert time.monotonic() - began >= 0.02
    assert Backoff().wait(lambda: True, timeout=0) is True


def cpu_of(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def test_a_waiter_is_woken_by_its_folder(tmp_path: Path) -> None:
    looks = 0

    def ready() -> bool:
        nonlocal looks
        looks += 1
        return (tmp_path / "news").exists()

    with FolderWait(PosixDisk(), str(tmp_path)) as waiting:
        timer = threading.Timer(0.3, (tmp_path / "news").touch)
        timer.start()
        assert waiting.wait(ready, timeout=60)
        timer.join()
    assert looks < 25  # the back-off alone would have looked forty times
    with FolderWait(PosixDisk(), str(tmp_path)) as waiting:
        assert waiting.wait(lambda: False, timeout=0.05) is False


@pytest.mark.parametrize("folder", ["/nowhere/at/all", None])
def test_where_a_folder_cannot_wake_the_back_off_goes_on(folder: str | None, tmp_path: Path) -> None:
    looks = iter([False] * 14 + [True])
    disk = PosixDisk() if folder else MemoryDisk()
    with FolderWait(disk, folder or str(tmp_path)) as waiting:
        assert waiting.wait(lambda: next(looks), timeout=60)


@pytest.mark.parametrize("kind", ["xchannel", "messagelog", "filechannel"])
def test_an_idle_follower_costs_next_to_nothing_and_is_there_at_once(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    writer: Any = open_writer(path, format=kind)
    writer.append(b"one")
    with open_log(path) as log:
        used = min(cpu_of(lambda: list(log.tail(timeout=1.0))) for _ in range(3))  # others may have used it too
        assert used < 0.02, f"{used:.3f} s of processor time in a second of waiting"
        timer = threading.Timer(0.2, writer.append, (b"two",))
        timer.start()
        assert next(log.tail(timeout=60)).to_payloads() == [b"two"]
        timer.join()
    writer.close()


def test_a_look_around_does_not_begin_the_short_sleeps_again(tmp_path: Path) -> None:
    path = str(tmp_path / "ticks")
    with Writer.open(path) as writer, Reader.open(path, "latest") as reader:
        assert not reader.wait(0.05)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        assert not reader.wait(2.0)
        slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
        assert slept < 240, (
            f"{slept} sleeps in two seconds"
        )  # 200 of 10 ms, and eight short ones once: not at each look
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        assert not reader.wait(0.1, patient=True)
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 15
        timer = threading.Timer(0.2, writer.append, (b"one",))
        timer.start()
        assert reader.wait(60, patient=True)
        timer.join()


async def until(waiting: LoopWait, ready: Callable[[], bool]) -> int:
    looks = 1
    while not ready():
        await waiting.pause()
        looks += 1
    return looks


def test_a_waiter_on_a_loop_is_woken_by_its_folder(tmp_path: Path) -> None:
    async def work() -> tuple[int, float]:
        waiting, news, loop = LoopWait(PosixDisk(), str(tmp_path)), tmp_path / "news", asyncio.get_running_loop()
        loop.call_later(0.3, news.touch)
        used = time.process_time()
        looks = await until(waiting, news.exists)
        used = time.process_time() - used
        waiting.close()
        return looks, used

    looks, _ = asyncio.run(work())
    assert looks < 25  # the back-off alone would have looked forty times


def test_a_waiter_on_a_loop_is_woken_from_any_thread_and_by_its_end(tmp_path: Path) -> None:
    async def work() -> None:
        waiting = LoopWait(PosixDisk(), str(tmp_path))
        said: list[str] = []
        timer = threading.Timer(0.1, lambda: (said.append("woken"), waiting.wake()))
        timer.start()
        await until(waiting, lambda: bool(said))
        await asyncio.get_running_loop().run_in_executor(None, timer.join)
        both = asyncio.gather(*(until(waiting, lambda: len(said) > 1) for _ in range(2)))
        await asyncio.sleep(0.05)
        said.append("closed")
        waiting.close()
        async with asyncio.timeout(60):
            await both

    asyncio.run(work())


def test_a_folder_that_changes_in_vain_does_not_keep_a_loop_busy(tmp_path: Path) -> None:
    async def work() -> int:
        waiting, looks = LoopWait(PosixDisk(), str(tmp_path)), 0
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                (tmp_path / "noise").write_bytes(b"x")

        thread = threading.Thread(target=write)
        thread.start()
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            await waiting.pause()
            looks += 1
        stop.set()
        thread.join()
        waiting.close()
        return looks

    assert asyncio.run(work()) < 2000  # twice a millisecond at most: woken, and a pause


def test_a_descriptor_that_is_done_with_is_used_again(tmp_path: Path) -> None:
    def one() -> None:
        with FolderWait(PosixDisk(), str(tmp_path)) as waiting:
            waiting.wait(lambda: False, timeout=0.05)

    one()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        one()
    assert len(os.listdir("/proc/self/fd")) == before
    watch = FolderWatch.begin(str(tmp_path))
    assert watch is not None
    assert not watch.wait(0)  # nothing is left of the one before
    (tmp_path / "news").touch()
    assert watch.wait(60)
    watch.close()


@pytest.mark.parametrize("kind", ["xchannel", "messagelog", "filechannel"])
def test_an_idle_follower_on_a_loop_costs_next_to_nothing_and_is_there_at_once(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    writer: Any = open_writer(path, format=kind)
    writer.append(b"one")

    async def work() -> float:
        with open_log(path) as log:
            batches = aio.tail(log)
            following = asyncio.create_task(anext(batches))
            await asyncio.sleep(0.3)
            used = 1.0
            for _ in range(3):
                begun = time.process_time()
                await asyncio.sleep(0.5)
                used = min(used, (time.process_time() - begun) / 0.5)
            writer.append(b"two")
            async with asyncio.timeout(60):
                assert (await following).to_payloads() == [b"two"]
            await batches.aclose()
            return used

    used = asyncio.run(work())
    assert used < 0.03, f"{used:.1%} of a core while nothing happens"
    writer.close()


def test_a_folder_tells_of_messages_that_were_stored_without_a_system_call(tmp_path: Path) -> None:
    path = str(tmp_path / "jobs")
    with FileChannel.open(path, sync="none") as queue:
        for number in range(100):  # single sends in a row: the last ones are stores to memory
            queue.append(b"%d" % number)
        watch = FolderWatch.begin(path)
        assert watch is not None
        for _ in range(3):
            while watch.wait(0.1):
                pass  # until nothing happens any more
            queue.append(b"after a silence")
            assert watch.wait(10)
        for _ in range(1000):
            queue.append(b"while others are sent")
        while watch.wait(0.1):
            pass
        watch.close()
