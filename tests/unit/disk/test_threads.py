"""Promise: what was submitted is done once, whether or not there are threads to be had."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait

import pytest

from penstock.disk import Threads, start_thread
from penstock.disk.wait import Backoff


class NoThreads:
    """Stands in the place of Thread.start, and lets none start."""

    def __get__(self, thread: threading.Thread, kind: type) -> Callable[[], None]:
        raise RuntimeError("can't start new thread")


def test_without_threads_whoever_submits_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    with Threads(4, "t") as threads:
        with monkeypatch.context() as shortage:
            shortage.setattr(threading.Thread, "start", NoThreads())
            futures = [threads.submit(done.append, number) for number in range(5)]
            assert done == [0, 1, 2, 3, 4]
            assert all(future.done() for future in futures)
            with pytest.raises(ZeroDivisionError):
                threads.submit(lambda: 1 // 0).result()
            assert start_thread(lambda: None, "t") is None
        where = threads.submit(threading.current_thread).result()  # the shortage is over
        assert where is not threading.current_thread()
    assert done == [0, 1, 2, 3, 4]  # nothing is done again later


def test_with_one_thread_the_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    with Threads(4, "t") as threads:
        first = threads.submit(go.wait)
        with monkeypatch.context() as shortage:
            shortage.setattr(threading.Thread, "start", NoThreads())
            rest = [threads.submit(lambda number=number: number) for number in range(10)]
            assert not any(future.done() for future in rest)
            go.set()
            assert [future.result(60) for future in rest] == list(range(10))
        assert first.result(60)


def test_who_waits_for_what_is_cancelled_by_a_shutdown_goes_on() -> None:
    go = threading.Event()
    threads = Threads(1, "t")
    futures = [threads.submit(go.wait, 60), *(threads.submit(abs, -number) for number in range(3))]
    futures[1].cancel()
    threads.shutdown(wait=False, cancel_futures=True)
    go.set()
    done, left = wait(futures, timeout=60)
    assert (len(done), left) == (4, set())
    assert [future.cancelled() for future in futures] == [False, True, True, True]


def test_as_many_work_at_once_as_there_may_be_threads() -> None:
    together = threading.Barrier(8)
    with Threads(8, "t") as threads:
        assert sorted(threads.map(lambda _: together.wait(60), range(8))) == list(range(8))
        assert len(threads._threads) == 8
        assert list(threads.map(abs, range(-100, 0))) == list(range(100, 0, -1))
        assert len(threads._threads) == 8


def test_shutting_down_cancels_or_waits() -> None:
    go = threading.Event()
    threads = Threads(1, "t")
    first = threads.submit(go.wait)
    second = threads.submit(lambda: 2)
    assert Backoff().wait(first.running, 60)
    threads.shutdown(wait=False, cancel_futures=True)
    go.set()
    assert second.cancelled()
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(lambda: 3)


def test_nobody_keeps_what_is_dropped() -> None:
    threads = Threads(2, "t")
    (thread,) = [threads.submit(threading.current_thread).result()]
    del threads
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_what_was_submitted_is_done_before_the_process_ends() -> None:
    code = (
        "import time; from penstock.disk import Threads\n"
        "threads = Threads(1, 't')\n"
        "for n in range(3): threads.submit(lambda n=n: (time.sleep(0.05), print(n, flush=True)))\n"
    )
    began = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == ["0", "1", "2"], time.monotonic() - began
