"""An export round goes every way of its state machine, and leaves no artifact behind on any of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from penstock.artifact import (
    ExportLease,
    ExportManifest,
    Transport,
    export_store,
    exporter_of,
    import_artifact,
    run_export_round,
)
from penstock.artifact.round import NEXT, RoundState
from penstock.disk.failpoint import arm
from penstock.disk.objectstore import Obstore
from penstock.errors import ClosedError, RetryError
from penstock.fold import AppliedWatch, Follow, WatchScope
from penstock.kv import EmbeddedConnection
from penstock.log.detect import open_log
from penstock.log.envelope import Envelope, encode_envelope
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.store import AppendLogStore
from penstock.testing.clock import FakeClock
from penstock.types import KvUpdate, WatchCursor

S = RoundState


@pytest.fixture
async def bucket(tmp_path: Path) -> AsyncIterator[Any]:
    async with EmbeddedConnection(tmp_path / "buckets") as connection:
        yield await connection.store("routes")


@pytest.fixture
def objects() -> Obstore:
    return Obstore(MemoryStore(), "memory://")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


@pytest.fixture
def export(tmp_path: Path) -> Callable[[int], Any]:
    """Return what makes an exporter of a store at a revision."""

    def make(revision: int) -> Any:
        async def run(destination: str) -> ExportManifest:
            with AppendLogStore.open(tmp_path / f"fold{revision}.snap") as store:
                store.apply([KvUpdate.put("a", b"%d" % revision, revision)], WatchCursor.of(revision))
                return export_store(store, destination)

        return run

    return make


def lease(bucket: Any, holder: str = "me", clock: FakeClock | None = None) -> ExportLease:
    return ExportLease(bucket, "export-lease", holder, clock=clock or FakeClock())


async def test_a_round_that_wins_publishes_completes_and_prunes(
    bucket: Any, objects: Obstore, scratch: Path, export: Any
) -> None:
    transport, clock = Transport(objects, "p", clock=FakeClock(now_ns=2**62)), FakeClock()
    for revision in (5, 9):
        clock.pass_(1000)
        report = await run_export_round(lease(bucket, clock=clock), 300, export(revision), transport, "k", scratch)
        assert report.states == [S.IDLE, S.ACQUIRING, S.EXPORTING, S.UPLOADING, S.COMPLETING, S.IDLE]
        assert report.outcome is not None
        assert (report.outcome.result, report.completed) == ("published", True)
    assert len(report.pruned) == 1
    assert len(list(objects.objects())) == 2
    current = await lease(bucket).current()
    assert current is not None
    assert current.completed_cursor_hex == "0000000000000009"
    assert os.listdir(scratch) == []


async def test_a_round_that_loses_the_lease_does_nothing(
    bucket: Any, objects: Obstore, scratch: Path, export: Any
) -> None:
    held = await lease(bucket, "other").try_acquire(300)
    assert held is not None
    report = await run_export_round(lease(bucket), 300, export(5), Transport(objects), "k", scratch)
    assert (report.won, report.states) == (False, [S.IDLE, S.ACQUIRING, S.IDLE])
    assert list(objects.objects()) == []
    await held.abandon()


async def test_a_superseded_round_gives_the_lease_back(
    bucket: Any, objects: Obstore, scratch: Path, export: Any
) -> None:
    transport = Transport(objects)
    await run_export_round(ExportLease(bucket, "another", "x"), 300, export(9), transport, "k", scratch)
    report = await run_export_round(lease(bucket), 300, export(5), transport, "k", scratch)
    assert report.states == [S.IDLE, S.ACQUIRING, S.EXPORTING, S.UPLOADING, S.ABANDONING, S.IDLE]
    assert report.outcome is not None
    assert (report.outcome.result, report.outcome.remote_cursor) == ("superseded", WatchCursor.of(9))
    assert await lease(bucket).current() is None
    assert os.listdir(scratch) == []


@pytest.mark.parametrize("step", ["exporting", "uploading"])
async def test_a_round_that_fails_gives_the_lease_back_and_says_why(
    step: str, bucket: Any, objects: Obstore, scratch: Path, export: Any
) -> None:
    def fail() -> None:
        raise RetryError("the store is away")

    with arm(f"artifact.round.{step}", fail), pytest.raises(RetryError, match="away"):
        await run_export_round(lease(bucket), 600, export(5), Transport(objects), "k", scratch)
    assert os.listdir(scratch) == []
    report = await run_export_round(lease(bucket, "other"), 600, export(6), Transport(objects), "k", scratch)
    assert report.won


@pytest.mark.parametrize(("mine", "theirs"), [(5, 9), (9, 9), (12, 9)])
@pytest.mark.parametrize("ahead", [1000, -1000])
async def test_a_lease_that_was_stolen_by_a_clock_costs_a_second_export_and_nothing_else(
    mine: int, theirs: int, ahead: int, bucket: Any, objects: Obstore, scratch: Path, export: Any
) -> None:
    """The one whose clock is ahead steals the lease of the other, who is still exporting and comes later."""
    transport = Transport(objects, "p", clock=FakeClock(now_ns=2**62))
    here, there = FakeClock(now_ns=10**18), FakeClock(now_ns=10**18 + ahead * 10**9)
    second: list[Any] = []

    async def slow(destination: str) -> ExportManifest:
        other = run_export_round(lease(bucket, "b", there), 300, export(theirs), transport, "k", scratch)
        second.append(await other)
        return await export(mine)(destination)  # type: ignore[no-any-return]

    first = await run_export_round(lease(bucket, "a", here), 300, slow, transport, "k", scratch)
    assert transport.manifest("k").rank == max(mine, theirs if ahead > 0 else 0)
    transport.download("k", scratch.parent / "got")
    assert first.outcome is not None
    assert os.listdir(scratch) == []
    record = await lease(bucket).current()
    assert record is not None
    if ahead < 0:  # by that clock the lease has not ended
        assert (second[0].won, first.outcome.result, first.completed, record.holder_id) == (
            False,
            "published",
            True,
            "a",
        )
        return
    assert second[0].won
    assert second[0].completed
    assert first.outcome.result == ("superseded" if mine < theirs else "published")
    assert not first.completed
    assert (record.holder_id, record.completed_cursor_hex) == ("b", f"{theirs:016x}")


async def test_a_round_without_room_for_its_artifact_gives_the_lease_back(
    bucket: Any, objects: Obstore, scratch: Path, export: Any
) -> None:
    with pytest.raises(FileNotFoundError):
        await run_export_round(lease(bucket), 600, export(5), Transport(objects), "k", scratch / "gone")
    assert await lease(bucket).current() is None


async def test_what_comes_after_publishing_cannot_fail_a_round(
    bucket: Any, objects: Obstore, scratch: Path, export: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = Transport(objects)

    def fail(*_: Any) -> Any:
        raise RetryError("the store is away")

    monkeypatch.setattr(transport, "prune", fail)
    monkeypatch.setattr(bucket.writer, "update", fail)
    report = await run_export_round(lease(bucket), 300, export(5), transport, "k", scratch)
    assert report.outcome is not None
    assert (report.outcome.result, report.completed, report.pruned) == ("published", False, [])


def test_every_arrow_of_the_machine_is_tried_here() -> None:
    tried = {
        (S.IDLE, S.ACQUIRING), (S.ACQUIRING, S.IDLE), (S.ACQUIRING, S.EXPORTING), (S.EXPORTING, S.UPLOADING),
        (S.EXPORTING, S.ABANDONING), (S.UPLOADING, S.ABANDONING), (S.UPLOADING, S.COMPLETING), (S.COMPLETING, S.IDLE),
        (S.ABANDONING, S.IDLE),
    }  # fmt: skip
    assert tried == {(state, after) for state, following in NEXT.items() for after in following}


async def test_two_rounds_at_once_have_one_winner(bucket: Any, objects: Obstore, scratch: Path, export: Any) -> None:
    transport = Transport(objects)
    reports = await asyncio.gather(
        run_export_round(lease(bucket, "a"), 300, export(5), transport, "k", scratch),
        run_export_round(lease(bucket, "b"), 300, export(6), transport, "k", scratch),
    )
    assert sorted(report.won for report in reports) == [False, True]
    assert os.listdir(scratch) == []


async def test_a_running_fold_of_a_bucket_is_exported_at_its_cursor(bucket: Any, tmp_path: Path) -> None:
    for number in range(20):
        await bucket.writer.put(f"k{number % 5}", b"%d" % number)
    stop = asyncio.Event()
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        watch = AppliedWatch(bucket.watcher, WatchScope.all(), apply=lambda batch: None, store=store, stop=stop)
        running = asyncio.create_task(watch.run())
        async with asyncio.timeout(60):
            while not watch.hydrated:
                await asyncio.sleep(0.01)
        await bucket.writer.put("k0", b"last")
        async with asyncio.timeout(60):
            while watch.applied != WatchCursor.of(21):
                await asyncio.sleep(0.01)
        manifest = await exporter_of(watch)(str(tmp_path / "artifact"))
        stop.set()
        assert await running == WatchCursor.of(21)
        with pytest.raises(ClosedError):
            await exporter_of(watch)(str(tmp_path / "late"))
    assert manifest.cursor == WatchCursor.of(21)
    import_artifact(tmp_path / "artifact", tmp_path / "copy.snap")
    with AppendLogStore.open(tmp_path / "copy.snap") as copy:
        found = copy.get("k0")
        assert found is not None
        assert (found.value, copy.count()) == (b"last", 5)


async def test_a_running_fold_of_a_log_is_exported_between_two_applies(tmp_path: Path) -> None:
    stop = asyncio.Event()
    writer = MessageLog.open(tmp_path / "log", MessageLogOptions(content="envelope/1"))
    with open_log(str(tmp_path / "log")) as log, AppendLogStore.open(tmp_path / "fold.snap") as store, writer:
        fold = Follow(log, store, stop=stop)
        running = asyncio.create_task(fold.run())
        for turn in range(5):
            for number in range(10):
                writer.append(encode_envelope(Envelope(b"k%d" % number, b"%d" % turn)))
            manifest = await exporter_of(fold)(str(tmp_path / f"a{turn}"))
            import_artifact(tmp_path / f"a{turn}", tmp_path / f"c{turn}")
            with AppendLogStore.open(tmp_path / f"c{turn}", read_only=True) as copy:
                newest = max((entry.version.as_int() or 0 for entry in copy.range()), default=0)
                assert manifest.rank in (0, newest + 1)
        stop.set()
        await running
        with pytest.raises(ClosedError):
            await exporter_of(fold)(str(tmp_path / "late"))
