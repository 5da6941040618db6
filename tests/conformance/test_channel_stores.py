"""Every form of a channel store passes the one suite of penstock.testing."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.channels.model import PersistedChannel
from penstock.channels.store import (
    ChannelStore,
    FileChannelStore,
    MemoryChannelStore,
    channel_hash,
)
from penstock.disk import MemoryDisk
from penstock.testing.channel_store_conformance import ChannelStoreConformance
from penstock.testing.channel_stores import FailingChannelStore
from penstock.testing.faulty import FaultyDisk


class TestFileStore(ChannelStoreConformance):
    def make_store(self, place: Any) -> ChannelStore:
        return FileChannelStore(str(place / "data" / "below"))


class TestFileStoreInMemory(ChannelStoreConformance):
    def make_place(self, tmp_path: Any) -> Any:
        return FaultyDisk(MemoryDisk())

    def make_store(self, place: Any) -> ChannelStore:
        return FileChannelStore("data", place)


class TestMemoryStore(ChannelStoreConformance):
    def make_place(self, tmp_path: Any) -> Any:
        return MemoryChannelStore()

    def make_store(self, place: Any) -> ChannelStore:
        return place  # type: ignore[no-any-return]


class TestFailingStore(TestMemoryStore):
    """One that is not told to fail is like any other."""

    def make_store(self, place: Any) -> ChannelStore:
        return FailingChannelStore(place)


@pytest.mark.parametrize("operation", ["save", "delete", "hashes", "load"])
def test_a_failing_store_fails_before_anything_changes(operation: str) -> None:
    inner = MemoryChannelStore()
    kept = inner.save(PersistedChannel("kept"))
    store = FailingChannelStore(inner)
    store.fail[operation] = OSError(28, "No space left on device")
    calls = {
        "save": lambda: store.save(PersistedChannel("new")),
        "delete": lambda: store.delete(kept),
        "hashes": store.hashes,
        "load": lambda: store.load(kept),
    }
    with pytest.raises(OSError, match="No space left"):
        calls[operation]()
    assert inner.hashes() == [channel_hash("kept")]
