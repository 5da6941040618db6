"""An embedded bucket passes the one suite of key-value backends, on a real folder and in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.disk import MemoryDisk
from penstock.kv import KvConnection, KvStore
from penstock.kv.embedded.connection import EmbeddedConnection, EmbeddedKvStore, EmbeddedOptions
from penstock.testing.kv_conformance import KvConformance


class TestEmbedded(KvConformance):
    folder = Path()

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "buckets"

    def new_connection(self) -> KvConnection:
        return EmbeddedConnection(self.folder)

    async def compact(self, store: KvStore, revision: int) -> None:
        assert isinstance(store, EmbeddedKvStore)
        await store.compact(revision)


class TestEmbeddedInMemory(TestEmbedded):
    """The disk is only a seam: a bucket on the memory disk keeps the same promises."""

    @pytest.fixture(autouse=True)
    def _memory(self) -> Iterator[None]:
        self.disk = MemoryDisk()
        yield
        del self.disk  # pytest keeps this object; each file of a memory disk has a descriptor

    def new_connection(self) -> KvConnection:
        return EmbeddedConnection("buckets", EmbeddedOptions(sync="none"), disk=self.disk)
