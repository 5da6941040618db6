"""What a connection to NATS promises: dialled once, shut down at any time, back after a crash."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nats
import pytest
from nats_use import WAIT_SECONDS, new_store

from penstock.errors import NotConnected
from penstock.kv import NatsConnection, NatsOptions
from penstock.kv.nats.watch import NatsWatch
from penstock.testing.kv_conformance import collect
from penstock.testing.nats import NatsServer
from penstock.testing.proxy import TcpProxy


async def test_a_given_client_is_used_and_never_dialled_again(server: NatsServer) -> None:
    client = await nats.connect(server.url)
    connection = NatsConnection.from_client(client)
    assert connection.is_healthy
    store = await new_store(connection)
    await store.writer.put("a", b"1")
    async with await store.watcher.watch_all() as watch:
        assert len(await collect(watch, 1)) == 1
    await connection.shutdown()
    assert not connection.is_healthy
    with pytest.raises(NotConnected, match="from_client"):
        await connection.connect()


async def test_sixteen_connects_dial_once(server: NatsServer) -> None:
    connection = NatsConnection(NatsOptions(url=server.url))
    await asyncio.gather(*(connection.connect() for _ in range(16)))
    first = connection.client
    await connection.connect()
    assert connection.client is first
    await connection.shutdown()
    with pytest.raises(NotConnected):
        connection.client  # noqa: B018


async def test_a_watch_ends_when_its_connection_is_shut_down(server: NatsServer) -> None:
    connection = NatsConnection(NatsOptions(url=server.url))
    await connection.connect()
    store = await new_store(connection)
    watch = await store.watcher.watch_all()
    waiting = asyncio.create_task(watch.next_batch())
    await asyncio.sleep(0.05)
    await connection.shutdown()
    with pytest.raises(NotConnected):
        await asyncio.wait_for(waiting, WAIT_SECONDS)
    await watch.aclose()


async def test_a_connection_without_a_network_is_shut_down_all_the_same(server: NatsServer) -> None:
    with TcpProxy(server.port) as proxy:
        connection = NatsConnection(NatsOptions(url=f"nats://127.0.0.1:{proxy.port}"))
        await connection.connect()
        store = await new_store(connection)
        proxy.cut()
        async with asyncio.timeout(WAIT_SECONDS):
            while connection.is_healthy:
                await asyncio.sleep(0.01)
        waiting = asyncio.create_task(store.reader.get("a"))  # goes out with the next connection, if there is one
        await asyncio.sleep(0.05)
        await connection.shutdown()
        with pytest.raises(NotConnected, match="was shut down before"):  # at once, however long it might have taken
            await waiting
        assert not connection.is_healthy
        async with asyncio.timeout(WAIT_SECONDS):
            while [task for task in asyncio.all_tasks() if "site-packages/nats" in repr(task)]:
                await asyncio.sleep(0.01)
        proxy.heal()
        await connection.connect()
        await store.writer.put("a", b"1")  # a bucket found before is found again
        await connection.shutdown()


async def test_user_and_password_in_the_address_are_used(tmp_path: Path) -> None:
    with NatsServer(str(tmp_path), "--user", "me", "--pass", "s@cret") as server:
        address = server.url.removeprefix("nats://")
        async with NatsConnection(NatsOptions(url=f"nats://me:s%40cret@{address}")) as connection:
            assert connection.is_healthy
        with pytest.raises(NotConnected):
            await NatsConnection(NatsOptions(url=f"nats://me:wrong@{address}")).connect()


async def test_health_and_watches_live_through_a_crash_of_the_server(tmp_path: Path) -> None:
    with NatsServer(str(tmp_path)) as server:
        connection = NatsConnection(NatsOptions(url=server.url))
        await connection.connect()
        store = await new_store(connection)
        watch = await store.watcher.watch_all()
        await store.writer.put("a", b"1")
        assert [update.key for update in await collect(watch, 1)] == ["a"]

        server.stop()
        async with asyncio.timeout(WAIT_SECONDS):
            while connection.is_healthy:
                await asyncio.sleep(0.02)
        server.start()
        async with asyncio.timeout(WAIT_SECONDS):
            while not connection.is_healthy:
                await asyncio.sleep(0.02)

        await store.writer.put("b", b"2")
        assert [update.key for update in await collect(watch, 1)] == ["b"]
        assert isinstance(watch, NatsWatch)
        assert watch.resets >= 1
        await watch.aclose()
        await connection.shutdown()
