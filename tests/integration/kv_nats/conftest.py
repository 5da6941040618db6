"""One server for all tests of NATS buckets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from nats_use import new_store

from penstock.kv import NatsConnection, NatsOptions
from penstock.kv.nats.bucket import NatsKvStore
from penstock.testing.nats import NatsServer


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(str(tmp_path_factory.mktemp("nats"))) as running:
        yield running


@pytest.fixture
async def connection(server: NatsServer) -> AsyncIterator[NatsConnection]:
    async with NatsConnection(NatsOptions(url=server.url)) as connected:
        yield connected


@pytest.fixture
async def store(connection: NatsConnection) -> NatsKvStore:
    return await new_store(connection)
