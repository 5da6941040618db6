"""What the suites of key-value backends share: the backend they are tried on, and how its updates are collected."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.kv.roles import KvConnection, KvStore, StoreConfig, Watch
from penstock.types import KvUpdate

__all__ = ["KvBackend", "WAIT_SECONDS", "collect", "quiet", "short"]

WAIT_SECONDS = 60.0


async def collect(watch: Watch, count: int, limit: int = 65536) -> list[KvUpdate]:
    """Return the next ``count`` updates of a watch, as objects."""
    found: list[KvUpdate] = []
    async with asyncio.timeout(WAIT_SECONDS):
        while len(found) < count:
            found += list(await watch.next_batch(min(limit, count - len(found))))
    return found


async def quiet(watch: Watch, seconds: float = 0.2) -> bool:
    """Whether a watch delivers nothing for a moment."""
    try:
        async with asyncio.timeout(seconds):
            await watch.next_batch()
    except TimeoutError:
        return True
    return False


def short(updates: list[KvUpdate]) -> list[tuple[str, str, bytes]]:
    """Return updates as (op, key, value)."""
    return [(update.op.name.lower(), update.key, update.value) for update in updates]


class KvBackend:
    """A backend under test: subclass it and say how to connect and how to lose history."""

    def new_connection(self) -> KvConnection:
        """Return a connection of the backend, not connected yet."""
        raise NotImplementedError

    async def compact(self, store: KvStore, revision: int) -> None:
        """Make the backend forget every change up to and including ``revision``."""
        raise NotImplementedError

    @pytest.fixture
    async def connection(self) -> AsyncIterator[KvConnection]:
        """Return a connection that stands."""
        async with self.new_connection() as connection:
            yield connection

    @pytest.fixture
    async def store(self, connection: KvConnection) -> KvStore:
        """Return a bucket of its own for each test."""
        return await self.new_store(connection)

    async def new_store(self, connection: KvConnection, **settings: Any) -> KvStore:
        """Return a new bucket with settings of a StoreConfig."""
        return await connection.store_with_config(StoreConfig(name=f"t{uuid.uuid4().hex}", **settings))
