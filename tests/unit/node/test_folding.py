"""Folds and ships of a node: logs that come later, artifacts to begin with, segments that are sealed in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.artifact import transport_for
from penstock.artifact.export import export_store
from penstock.disk import object_store_for
from penstock.errors import NotFoundError
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog
from penstock.mqtt import Client
from penstock.node import IngestWriter
from penstock.node.config import load_config
from penstock.node.folding import STORES
from penstock.node.node import Node
from penstock.ship import open_shipped
from penstock.ship.shipper import Shipper
from penstock.store import AppendLogStore, open_store
from penstock.types import KvUpdate, WatchCursor


@contextlib.asynccontextmanager
async def node(folder: Path, **more: Any) -> AsyncIterator[Node]:
    given = {"data": str(folder / "d"), "mqtt.port": 0, "channels.enabled": False, "http.enabled": False}
    served = Node(load_config(None, {**given, **more}))
    await served.start()
    try:
        yield served
    finally:
        await served.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def part(served: Node, name: str) -> dict[str, Any]:
    found: dict[str, Any] = served.describe()["parts"][name]
    return found


def readings(count: int) -> list[bytes]:
    return [encode_envelope(Envelope(b"pump-%d" % (n % 3), b"%d" % n)) for n in range(count)]


def shipped(url: str) -> int:
    try:
        with open_shipped(url) as log:
            return len(log.read(log.first_position))
    except NotFoundError:
        return 0


def test_a_fold_waits_for_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    log = tmp_path / "later"

    async def run() -> None:
        fold = {"name": "latest", "log": str(log), "store": str(tmp_path / "latest.snap")}
        async with node(tmp_path, fold=[fold], ship=[{"log": str(log), "url": f"file://{tmp_path}/up"}]) as served:
            assert served.failures == {}
            assert part(served, "fold:latest")["state"] == part(served, "ship:later")["state"] == "degraded"
            assert "waits for its log" in part(served, "fold:latest")["reason"]
            with MessageLog.open(log, content=CONTENT) as writer:
                writer.append_many(readings(30))
                await until(lambda: part(served, "fold:latest").get("records") == 30)
            await until(lambda: part(served, "ship:later")["state"] == "ready")
            assert part(served, "fold:latest")["restarts"] == 0

    asyncio.run(run())


@pytest.mark.parametrize("backend", ["append-log", "rocksdb", "lmdb"])
def test_a_damaged_store_is_said_though_its_log_is_not_there_yet(tmp_path: Path, backend: str) -> None:
    store = tmp_path / "latest"
    with STORES[backend].open(str(store)) as made:
        made.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(2))
    damaged = {"append-log": store, "rocksdb": store / "CURRENT", "lmdb": store / "data.mdb"}[backend]
    damaged.write_bytes(b"\xff" * 8192)

    async def run() -> None:
        fold = {"name": "latest", "log": str(tmp_path / "later"), "store": str(store), "backend": backend}
        async with node(tmp_path, fold=[fold]) as served:
            assert part(served, "fold:latest")["state"] == "failed"
            assert str(store) in part(served, "fold:latest")["reason"]

    asyncio.run(run())


def test_a_fold_begins_with_an_artifact_and_follows_the_shipped_log(tmp_path: Path) -> None:
    log, url = tmp_path / "readings", f"file://{tmp_path}/up"
    with MessageLog.open(log, content=CONTENT) as writer:
        writer.append_many(readings(30))
        writer.roll()
        with Shipper(str(log), object_store_for(url)) as shipper:
            while shipper.step():
                pass

            async def first() -> None:
                fold = {"name": "latest", "log": str(log), "store": str(tmp_path / "first.snap")}
                async with node(tmp_path / "1", fold=[fold]) as served:
                    await until(lambda: part(served, "fold:latest").get("records") == 30)

            asyncio.run(first())
            with AppendLogStore.open(tmp_path / "first.snap") as store:
                export_store(store, str(tmp_path / "artifact"))
            folds = transport_for(f"{tmp_path}/folds", allow_non_atomic_pointer=True)
            folds.upload(str(tmp_path / "artifact"), "latest")
            writer.append_many(readings(6))
            writer.roll()
            while shipper.step():
                pass

    async def second() -> None:
        fold = {
            "name": "latest", "log": f"{url}/readings", "store": str(tmp_path / "second.snap"),
            "bootstrap": f"{tmp_path}/folds/latest",
        }  # fmt: skip
        async with node(tmp_path / "2", fold=[fold]) as served:
            await until(lambda: part(served, "fold:latest").get("lag") == 0)
            found = part(served, "fold:latest")
            assert (found["bootstrap"], found["records"]) == ("artifact", 6)

    asyncio.run(second())
    with open_store(str(tmp_path / "second.snap")) as store:
        assert store.cursor().token.as_int() == 37
        assert {entry.key: entry.value for entry in store.range()} == {
            "pump-0": b"3", "pump-1": b"4", "pump-2": b"5"
        }  # fmt: skip


def test_quiet_logs_of_the_node_are_shipped_whole(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/up"
    logs = {name: f"{tmp_path}/d/logs/{name}" for name in ("plant", "lab")}

    async def run() -> None:
        taps = [{"filter": "plant/#", "path": logs["plant"]}]
        ships = [{"log": path, "url": url, "roll_seconds": 0.1} for path in logs.values()]
        async with node(tmp_path, ship=ships, **{"mqtt.taps": taps}) as served:
            async with Client(f"mqtt://{served.addresses['mqtt']}") as client:
                for n in range(7):
                    await client.publish("plant/7", b"%d" % n, qos=1)
            with IngestWriter(str(tmp_path / "d"), "lab") as writer:
                await asyncio.to_thread(writer.append_many, [b"x"] * 5)
                await until(lambda: shipped(f"{url}/lab") == 5)
            await until(lambda: shipped(f"{url}/plant") == 7)

    asyncio.run(run())
