"""A node begins from what is here, from an artifact or from nothing, and says which and why."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest
from obstore.store import MemoryStore
from rocksdict import Options, Rdict

from penstock.artifact import Transport, bootstrap
from penstock.artifact.bootstrap import Window
from penstock.disk.failpoint import arm
from penstock.disk.objectstore import Obstore
from penstock.errors import LockedError, OptionsError, RetryError
from penstock.log.detect import open_log
from penstock.log.messagelog import MessageLog
from penstock.store import AppendLogStore, LmdbStore, RocksStore
from penstock.types import KvUpdate, WatchCursor

Make = Callable[..., Path]


def kept_from(first: int) -> Window:
    async def kept(cursor: WatchCursor) -> bool:
        return (cursor.token.as_int() or 0) + 1 >= first

    return kept


def local(path: Path, revision: int) -> None:
    with AppendLogStore.open(path) as store:
        store.apply([KvUpdate.put("old", b"1", revision)], WatchCursor.of(revision))


@pytest.fixture
def transport() -> Transport:
    return Transport(Obstore(MemoryStore(), "memory://"), "p")


async def test_a_store_whose_changes_are_kept_goes_on_by_itself(
    tmp_path: Path, transport: Transport, make_artifact: Make
) -> None:
    transport.upload(make_artifact(50), "k")
    local(tmp_path / "fold.snap", 10)
    report = await bootstrap(tmp_path / "fold.snap", kept_from(5), transport, "k")
    assert (report.way, report.cursor) == ("delta", WatchCursor.of(10))
    assert "10 is kept" in report.reason


@pytest.mark.parametrize("here", [True, False])
async def test_an_artifact_takes_the_place_of_nothing_or_of_what_has_expired(
    here: bool, tmp_path: Path, transport: Transport, make_artifact: Make
) -> None:
    transport.upload(make_artifact(50), "k")
    if here:
        local(tmp_path / "fold.snap", 10)
    report = await bootstrap(tmp_path / "fold.snap", kept_from(40), transport, "k")
    assert (report.way, report.cursor) == ("artifact", WatchCursor.of(50))
    assert ("10 has expired" if here else "no store is here") in report.reason
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        assert (store.cursor(), store.get("old"), store.count()) == (WatchCursor.of(50), None, 1)
    assert [name for name in os.listdir(tmp_path) if ".penstock-" in name and "snap.penstock" not in name] == []


async def test_without_an_artifact_everything_is_listed_again(tmp_path: Path, transport: Transport) -> None:
    report = await bootstrap(tmp_path / "fold.snap", kept_from(1), transport, "k")
    assert (report.way, report.cursor) == ("relist", WatchCursor())
    assert "no artifact is published" in report.reason
    local(tmp_path / "fold.snap", 10)
    report = await bootstrap(tmp_path / "fold.snap", kept_from(40), None)
    assert (report.way, report.cursor) == ("relist", WatchCursor.of(10))


async def test_an_artifact_older_than_what_is_kept_is_said_and_not_fetched(
    tmp_path: Path, transport: Transport, make_artifact: Make
) -> None:
    transport.upload(make_artifact(20), "k")
    local(tmp_path / "fold.snap", 10)
    report = await bootstrap(tmp_path / "fold.snap", kept_from(40), transport, "k")
    assert report.way == "relist"
    assert "artifact at 20 is older than what is kept" in report.reason
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        assert store.cursor() == WatchCursor.of(10)  # the fold repairs it


async def test_a_bad_artifact_is_said_and_the_store_stays(
    tmp_path: Path, transport: Transport, make_artifact: Make
) -> None:
    transport.upload(make_artifact(50), "k")
    (payload,) = [info.key for info in transport.store.objects() if info.key.endswith(".tar")]
    data, _ = transport.store.get(payload)
    transport.store.put(payload, data[:1000])
    local(tmp_path / "fold.snap", 10)
    report = await bootstrap(tmp_path / "fold.snap", kept_from(40), transport, "k")
    assert report.way == "relist"
    assert "cannot be used" in report.reason
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        assert store.cursor() == WatchCursor.of(10)


@pytest.mark.parametrize("harm", ["flipped", "torn header", "empty", "empty folder"])
async def test_a_damaged_store_is_replaced(
    harm: str, tmp_path: Path, transport: Transport, make_artifact: Make
) -> None:
    transport.upload(make_artifact(50), "k")
    path = tmp_path / "fold.snap"
    with AppendLogStore.open(path) as store:
        for revision in range(1, 9):
            store.apply([KvUpdate.put(f"old{revision}", b"1" * 50, revision)], WatchCursor.of(revision))
    data = path.read_bytes()
    if harm == "empty folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"flipped": data[:40] + b"~" + data[41:], "torn header": data[:3], "empty": b""}[harm])
    report = await bootstrap(path, kept_from(40), transport, "k")
    assert (report.way, report.cursor) == ("artifact", WatchCursor.of(50))
    assert ("cannot be used" in report.reason) is (harm != "empty folder")


async def test_a_store_that_is_gone_without_its_sidecars_is_replaced_by_one_that_opens(
    tmp_path: Path, transport: Transport, make_artifact: Make
) -> None:
    """The mark beside it says how far a longer file was synced; the artifact is no cut state of that."""
    transport.upload(make_artifact(50), "k")
    path = tmp_path / "fold.snap"
    with AppendLogStore.open(path) as store:
        store.apply([KvUpdate.put("old", bytes(5000), 10)], WatchCursor.of(10))
        store.sync()
    path.unlink()
    assert (tmp_path / "fold.snap.penstock-mark").exists()
    report = await bootstrap(path, kept_from(40), transport, "k")
    assert report.way == "artifact"
    for read_only in (True, False):
        with AppendLogStore.open(path, read_only=read_only) as store:
            assert store.cursor() == WatchCursor.of(50)


def _foreign(kind: str, path: Path) -> None:
    """Put something at a path that somebody has there, and that is no store of ours."""
    if kind == "file":
        path.write_bytes(b"years of work")
        return
    path.mkdir()
    if kind == "folder":
        (path / "thesis.txt").write_bytes(b"years of work")
    elif kind == "log":
        with MessageLog.open(path) as log:
            log.append(b"years of work")
    elif kind == "rocksdb":
        with contextlib.closing(Rdict(str(path), Options(raw_mode=True))) as database:
            database[b"a"] = b"years of work"
    else:
        with lmdb.open(str(path)) as environment, environment.begin(write=True) as change:
            change.put(b"a", b"years of work")


def _still_there(kind: str, path: Path) -> Any:
    if kind == "file":
        return path.read_text()
    if kind == "folder":
        return (path / "thesis.txt").read_text()
    if kind == "log":
        with open_log(str(path)) as log:
            return bytes(log.read(1).to_payloads()[0]).decode()
    if kind == "rocksdb":
        with contextlib.closing(Rdict(str(path), Options(raw_mode=True))) as database:
            return database[b"a"].decode()
    with lmdb.open(str(path)) as environment, environment.begin() as look:
        assert look.stat()["entries"] == 1  # and nothing was added to it
        return look.get(b"a").decode()


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("kind", ["file", "folder", "log", "rocksdb", "lmdb"])
async def test_what_is_no_store_is_never_replaced(
    kind: str, published: bool, tmp_path: Path, transport: Transport, make_artifact: Make
) -> None:
    if published:
        transport.upload(make_artifact(50), "k")
    path = tmp_path / "mine"
    _foreign(kind, path)
    with pytest.raises((OptionsError, OSError), match="mine"):
        await bootstrap(path, kept_from(40), transport, "k")
    assert _still_there(kind, path) == "years of work"


@pytest.mark.parametrize("kind", [AppendLogStore, RocksStore, LmdbStore])
async def test_a_store_that_someone_has_open_is_not_replaced(
    kind: Any, tmp_path: Path, transport: Transport, make_artifact: Make
) -> None:
    transport.upload(make_artifact(50), "k")
    path = tmp_path / "fold"
    with kind.open(path) as store:
        store.apply([KvUpdate.put("old", b"1", 10)], WatchCursor.of(10))
        with pytest.raises(LockedError, match="fold"):
            await bootstrap(path, kept_from(40), transport, "k")
        store.apply([KvUpdate.put("new", b"2", 11)], WatchCursor.of(11))
    with kind.open(path) as store:
        assert (store.cursor(), store.get("new").value) == (WatchCursor.of(11), b"2")
    report = await bootstrap(path, kept_from(40), transport, "k")
    assert (report.way, report.cursor) == ("artifact", WatchCursor.of(50))


@pytest.mark.parametrize("here", [True, False])
async def test_an_artifact_of_another_backend_than_asked_for_is_left_alone(
    here: bool, tmp_path: Path, transport: Transport, make_artifact: Make
) -> None:
    transport.upload(make_artifact(50), "k")
    path = tmp_path / "fold"
    if here:
        with RocksStore.open(path) as store:
            store.apply([KvUpdate.put("old", b"1", 10)], WatchCursor.of(10))
    report = await bootstrap(path, kept_from(40), transport, "k", backend="rocksdb")
    assert (report.way, report.cursor) == ("relist", WatchCursor.of(10) if here else WatchCursor())
    assert "of the backend append-log, and rocksdb is asked for" in report.reason
    with RocksStore.open(path) as store:
        assert store.count() == here
    assert (await bootstrap(tmp_path / "other", kept_from(40), transport, "k", backend="append-log")).way == "artifact"


@pytest.mark.parametrize(
    "problem", [RetryError("the store is away"), OSError(errno.ENOSPC, "full"), OptionsError("no")]
)
async def test_an_artifact_that_cannot_be_fetched_is_said_and_the_store_stays(
    problem: Exception, tmp_path: Path, transport: Transport, make_artifact: Make
) -> None:
    transport.upload(make_artifact(50), "k")
    local(tmp_path / "fold.snap", 10)

    def fail() -> Any:
        raise problem

    with arm("artifact.download.staged", fail):
        report = await bootstrap(tmp_path / "fold.snap", kept_from(40), transport, "k")
    assert report.way == "relist"
    assert str(problem) in report.reason
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        assert store.cursor() == WatchCursor.of(10)


@pytest.mark.parametrize("where", ["imported", "aside", "named"])
async def test_a_crash_while_two_stores_change_places_loses_neither(
    where: str, tmp_path: Path, transport: Transport, make_artifact: Make
) -> None:
    transport.upload(make_artifact(50), "k")
    local(tmp_path / "fold.snap", 10)

    def crash() -> Any:
        raise KeyboardInterrupt

    with arm(f"artifact.bootstrap.{where}", crash), pytest.raises(KeyboardInterrupt):
        await bootstrap(tmp_path / "fold.snap", kept_from(40), transport, "k")
    report = await bootstrap(tmp_path / "fold.snap", kept_from(40), transport, "k")
    assert report.cursor == WatchCursor.of(50)
    assert report.way == ("delta" if where == "named" else "artifact")
