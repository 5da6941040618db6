"""A node begins from what is here, from an artifact or from nothing, and says which and why."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from penstock.artifact import Transport, bootstrap
from penstock.artifact.bootstrap import Window
from penstock.disk.failpoint import arm
from penstock.disk.objectstore import Obstore
from penstock.store import AppendLogStore
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


async def test_a_damaged_store_is_replaced(tmp_path: Path, transport: Transport, make_artifact: Make) -> None:
    transport.upload(make_artifact(50), "k")
    (tmp_path / "fold.snap").write_bytes(b"no store at all")
    report = await bootstrap(tmp_path / "fold.snap", kept_from(40), transport, "k")
    assert (report.way, report.cursor) == ("artifact", WatchCursor.of(50))
    assert "cannot be used" in report.reason


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
