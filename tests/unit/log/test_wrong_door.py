"""Promises: whatever does not fit a log is refused by name, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.artifact import export_store
from penstock.channels import ChannelManager
from penstock.disk import PosixDisk, object_store_for
from penstock.errors import CorruptionError, OptionsError
from penstock.kv import EmbeddedConnection, StoreConfig
from penstock.kv.embedded.bucket import Bucket
from penstock.log.detect import open_writer
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.filechannel.log import FileChannelLog
from penstock.log.messagelog import MessageLog, MessageLogOptions, MessageLogReader
from penstock.log.xchannel import Writer
from penstock.mqtt.state_open import KeptBroker
from penstock.node.backup import back_up
from penstock.node.ledger.seams import write_seams
from penstock.node.node import hold_data
from penstock.ship import Shipper
from penstock.store import AppendLogStore, LmdbStore, RocksOptions, RocksStore


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_message_log_refuses_the_folder_of_a_queue(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "jobs") as channel:
        channel.append(b"one")
    before = names(tmp_path / "jobs")
    with pytest.raises(OptionsError, match="jobs: this is the folder of a queue"):
        MessageLog.open(tmp_path / "jobs")
    assert names(tmp_path / "jobs") == before


def test_a_queue_refuses_the_folder_of_a_message_log(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "ops") as log:
        log.append(b"one")
    before = names(tmp_path / "ops")
    with pytest.raises(OptionsError, match="ops: this is the folder of a message log"):
        FileChannel.open(tmp_path / "ops")
    assert names(tmp_path / "ops") == before


def test_a_writer_of_envelopes_refuses_a_raw_log(tmp_path: Path) -> None:
    MessageLog.open(tmp_path / "ops").close()
    with pytest.raises(OptionsError, match="are raw, not envelope/1"):
        MessageLog.open(tmp_path / "ops", MessageLogOptions(content="envelope/1"))
    FileChannel.open(tmp_path / "jobs").close()
    with pytest.raises(OptionsError, match="are raw, not envelope/1"):
        FileChannel.open(tmp_path / "jobs", ChannelOptions(content="envelope/1"))


def test_a_queue_refuses_a_time_it_cannot_keep(tmp_path: Path) -> None:
    writer = open_writer(str(tmp_path / "jobs"), format="filechannel")
    try:
        assert not writer.has_times
        with pytest.raises(OptionsError, match="no room for times"):
            writer.append(b"one", timestamp_ns=7)
        with pytest.raises(OptionsError, match="no room for times"):
            writer.append_many([b"one"], timestamp_ns=[7])
        assert writer.append(b"one") == 0
    finally:
        writer.close()


# --- Every kind at every door


def open_bucket(path: Path) -> Any:
    disk = PosixDisk()
    return Bucket.open(str(path), StoreConfig(name="b"), disk=disk)


class Channels:
    """A manager that is opened and closed like the others."""

    def __init__(self, path: Path) -> None:
        async def go() -> None:
            manager = await ChannelManager.open(path)
            await manager.close()

        asyncio.run(go())

    def close(self) -> None:
        """Nothing is open."""


class Buckets(Channels):
    """A folder of buckets, with one in it."""

    def __init__(self, path: Path) -> None:
        async def go() -> None:
            async with EmbeddedConnection(path) as connection:
                await connection.make("b")

        asyncio.run(go())


class Broker:
    """A broker that keeps its state, opened and closed."""

    def __init__(self, path: Path) -> None:
        loop = asyncio.new_event_loop()
        try:
            KeptBroker(str(path), loop=loop).close()
        finally:
            loop.close()

    def close(self) -> None:
        """Nothing is open."""


class Node:
    """The data directory of a node, taken and given back."""

    def __init__(self, path: Path) -> None:
        with hold_data(str(path)):
            pass

    def close(self) -> None:
        """Nothing is open."""


DOORS: dict[str, Callable[[Path], Any]] = {
    "queue": FileChannel.open,
    "shared queue": FileChannel.share,
    "message log": MessageLog.open,
    "channel": Writer.open,
    "append log": AppendLogStore.open,
    "rocksdb": lambda path: RocksStore.open(path, RocksOptions(cache_bytes=0)),
    "lmdb": LmdbStore.open,
    "bucket": open_bucket,
    "buckets": Buckets,
    "channels": Channels,
    "broker": Broker,
    "node": Node,
}
LOOKING: dict[str, Callable[[Path], Any]] = {
    "view of a queue": FileChannel.attach,
    "reader of a queue": FileChannelLog,
    "reader of a message log": MessageLogReader,
}
SAME = {
    "queue": {"shared queue", "view of a queue", "reader of a queue"},
    "shared queue": {"queue", "view of a queue", "reader of a queue"},
    "message log": {"reader of a message log"},
}


def everything(root: Path) -> dict[str, bytes | None]:
    """What is there, but for the empty file that was locked to look."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
        if not path.name.endswith(".penstock-lock")
    }


@pytest.mark.parametrize("kind", [kind for kind in DOORS if kind != "buckets"])  # a folder of folders may hold others
def test_whatever_does_not_fit_is_refused_by_name_and_left_alone(kind: str, tmp_path: Path) -> None:
    DOORS[kind](tmp_path / "thing").close()
    before = everything(tmp_path)
    for name, door in (DOORS | LOOKING).items():
        if name == kind or name in SAME.get(kind, ()):
            continue
        with pytest.raises((OptionsError, CorruptionError), match="thing"):
            door(tmp_path / "thing").close()
        assert everything(tmp_path) == before, name
    DOORS[kind](tmp_path / "thing").close()


def test_the_folder_of_what_has_no_door_of_its_own_is_refused_at_every_door(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "ticks", region_bytes=4096, roll_bytes=4096) as writer:
        for _ in range(3):
            writer.append(b"x" * 3000)
    with Shipper(str(tmp_path / "ticks"), object_store_for(str(tmp_path / "shipped thing"))) as shipper:
        shipper.step()
    with AppendLogStore.open(tmp_path / "fold") as store:
        export_store(store, str(tmp_path / "artifact thing"))
    Node(tmp_path / "node")
    write_seams(str(tmp_path / "node"), [])
    (tmp_path / "node" / "ledger").rename(tmp_path / "ledger thing")
    back_up(str(tmp_path / "node"), str(tmp_path / "backup thing"))
    Broker(tmp_path / "broker")
    (tmp_path / "broker" / "journal").rename(tmp_path / "journal thing")
    for kind in ("shipped", "artifact", "ledger", "backup", "journal"):
        before = everything(tmp_path)
        for name, door in (DOORS | LOOKING).items():
            with pytest.raises((OptionsError, CorruptionError), match="thing"):
                door(tmp_path / f"{kind} thing").close()
            assert everything(tmp_path) == before, (kind, name)


@pytest.mark.parametrize("name", DOORS | LOOKING)
def test_a_text_is_refused_at_every_door(name: str, tmp_path: Path) -> None:
    (tmp_path / "thing").write_text("hello world\n" * 1000)
    before = everything(tmp_path)
    with pytest.raises((OptionsError, CorruptionError), match="thing"):
        (DOORS | LOOKING)[name](tmp_path / "thing").close()
    assert everything(tmp_path) == before
