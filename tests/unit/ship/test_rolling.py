"""Rolling by age, so that a quiet log is shipped too; and a shipper that is slow on purpose."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ship_use import FORMATS, fill, open_writer, read_all, shipped

from penstock.disk.failpoint import arm
from penstock.disk.folderstore import FolderStore
from penstock.disk.objectstore import Obstore
from penstock.errors import ClosedError
from penstock.lifecycle import State
from penstock.log.detect import open_log
from penstock.ship import ShipOptions, ShipPart, Shipper, roll_quiet
from penstock.testing.clock import FakeClock


@pytest.mark.parametrize("format", FORMATS)
def test_a_quiet_log_whose_writer_this_process_has_open_is_rolled_and_shipped(
    format: str, store: Obstore, tmp_path: Path
) -> None:
    """A node has its taps and channels open for as long as it lives, and ships them."""
    with open_writer(format, tmp_path / "log") as writer:
        writer.append_many([b"one", b"two"])
        assert not roll_quiet(tmp_path / "log", 3600)
        assert roll_quiet(os.path.relpath(tmp_path / "log"), 0)
        assert not roll_quiet(tmp_path / "log", 0), "there is nothing in it"
        with Shipper(tmp_path / "log", store) as shipper:
            assert shipper.step() == 1
            assert shipper.status().lag_bytes == 0
        writer.append_many([b"three"])
    with shipped(store) as remote:
        assert read_all(remote) == [b"one", b"two"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_quiet_log_is_rolled_though_the_clock_was_set_back(format: str, tmp_path: Path) -> None:
    clock = FakeClock(now_ns=time.time_ns())
    with open_writer(format, tmp_path / "log") as writer:
        writer.append_many([b"one", b"two"])
        clock.jump(-10)
        assert not roll_quiet(tmp_path / "log", 60, clock=clock)
        clock.jump(-86400)
        assert roll_quiet(tmp_path / "log", 60, clock=clock)
        assert not roll_quiet(tmp_path / "log", 60, clock=clock)


def test_a_roll_by_age_leaves_a_record_alone_that_is_being_filled_in(tmp_path: Path) -> None:
    with open_writer("xchannel", tmp_path / "log") as writer:
        writer.append(b"one")
        view = writer.reserve(3)
        assert not roll_quiet(tmp_path / "log", 0)
        view[:] = b"two"
        writer.commit()
        assert roll_quiet(tmp_path / "log", 0)
        with open_log(str(tmp_path / "log")) as log:
            assert read_all(log) == [b"one", b"two"]


@pytest.mark.parametrize("format", ["xchannel", "messagelog"])
def test_a_foreign_log_is_not_rolled(format: str, tmp_path: Path) -> None:
    """Its writer takes no lock, so it may be there."""
    with open_writer(format, tmp_path / "log") as writer:
        writer.append(b"one")
    for path in tmp_path.rglob("*penstock-*"):
        path.unlink()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert not roll_quiet(tmp_path / "log", 0)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_shipper_that_is_closed_stops_sending_at_once(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 100)
    sending = threading.Event()
    options = ShipOptions(bytes_per_second=1)  # an hour
    shipper = Shipper(tmp_path / "log", store, options=options)
    failed: list[BaseException] = []

    def step() -> None:
        try:
            shipper.step()
        except ClosedError as exc:
            failed.append(exc)

    with arm("ship.put.before", sending.set):
        thread = threading.Thread(target=step)
        thread.start()
        assert sending.wait(60)
        shipper.close()
        thread.join(60)
    assert not thread.is_alive()
    assert failed


def test_a_shipper_that_is_closed_while_segments_go_up_side_by_side_ends(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow(FolderStore):
        def put(self, key: str, data: Any) -> None:
            if ".segments/" in key:
                begun.set()
                assert go.wait(60)
            super().put(key, data)

    with open_writer("messagelog", tmp_path / "log") as writer:
        for start in range(0, 200, 10):
            fill("messagelog", writer, start, 10)
    shipper = Shipper(tmp_path / "log", Slow(str(tmp_path / "up")))
    failed: list[BaseException] = []

    def step() -> None:
        try:
            shipper.step()
        except BaseException as exc:
            failed.append(exc)

    stepping = threading.Thread(target=step, daemon=True)
    stepping.start()
    assert begun.wait(60)
    closing = threading.Thread(target=shipper.close, daemon=True)
    closing.start()
    assert shipper._pool is not None
    while not shipper._pool._closed:
        time.sleep(0.001)
    go.set()
    for thread in (closing, stepping):
        thread.join(20)
        assert not thread.is_alive()
    assert [type(exc) for exc in failed] == [ClosedError]


def test_a_shipper_with_a_rate_names_what_is_up_before_all_of_it_is(store: Obstore, tmp_path: Path) -> None:
    clock = FakeClock()
    with open_writer("messagelog", tmp_path / "log") as writer:
        for start in range(0, 50, 10):
            fill("messagelog", writer, start, 10)
    options = ShipOptions(bytes_per_second=10)
    with Shipper(tmp_path / "log", store, options=options, clock=clock, sleep=clock.pass_) as shipper:
        assert [shipper.step() for _ in range(6)] == [1, 1, 1, 1, 1, 0]


async def test_a_part_that_is_paused_sends_nothing_until_it_goes_on(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 10)
    part = ShipPart(tmp_path / "log", store, paused=True, look_seconds=0.01)
    await part.start()
    await part.ready()
    status = part.status()
    assert status is not None
    assert (status.paused, status.backlog_segments, status.shipped_bytes) == (True, 1, 0)
    part.resume()
    while (status := part.status()) is None or status.backlog_segments:
        await asyncio.sleep(0.01)
    part.pause()
    await part.stop()
    with shipped(store) as remote:
        assert len(read_all(remote)) == 10


async def test_a_part_is_stopped_though_its_store_does_not_answer(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    class Silent(FolderStore):
        def put(self, key: str, data: Any) -> None:
            if ".segments/" in key:
                begun.set()
                go.wait(60)
            super().put(key, data)

    with open_writer("messagelog", tmp_path / "log") as writer:
        for start in range(0, 60, 10):
            fill("messagelog", writer, start, 10)
    part = ShipPart(tmp_path / "log", Silent(str(tmp_path / "up")))
    await part.start()
    assert await asyncio.to_thread(begun.wait, 60)
    rescue = threading.Timer(20, go.set)  # who waits for the store would hold the loop, and everything on it
    rescue.start()
    await part.stop()
    assert not go.is_set()
    rescue.cancel()
    go.set()


async def test_a_part_that_is_stopped_before_it_has_begun_takes_nothing_over(tmp_path: Path) -> None:
    asked, go_on, over = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Slow(FolderStore):
        def get(self, key: str, *, most: int | None = None) -> Any:
            if key.endswith(".shipped.json"):
                loop.call_soon_threadsafe(asked.set)
                go_on.wait(60)
            return super().get(key, most=most)

    class Watched(ShipPart):
        def _work(self) -> int:
            try:
                return super()._work()
            finally:
                over.set()

    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 5)
        part = Watched(tmp_path / "log", Slow(str(tmp_path / "up")))
        await part.start()
        async with asyncio.timeout(60):
            await asked.wait()
        await part.stop()
        go_on.set()
        assert await asyncio.to_thread(over.wait, 60)
    assert list(FolderStore(str(tmp_path / "up")).objects()) == []
    assert part.status() is None


async def test_a_part_that_meets_what_nobody_expected_fails_and_says_so(tmp_path: Path) -> None:
    class Odd(FolderStore):
        def put(self, key: str, data: Any) -> None:
            if ".segments/" in key:
                raise KeyError("nobody expected this")
            super().put(key, data)

    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 10)
        part = ShipPart(str(tmp_path / "log"), Odd(str(tmp_path / "up")))
        await part.start()
        async with asyncio.timeout(60):
            with pytest.raises(KeyError, match="nobody expected"):
                await part.wait()
        assert part.health().state is State.FAILED
        assert "nobody expected" in part.health().reason
        await part.stop()
