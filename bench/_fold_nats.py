"""How fast does a fold hydrate from a real nats-server on loopback, and what does a restart cost?

n keys of 28 bytes with 100-byte values.  Hydration is measured without a store, with each backend, and beside it with
the documented way of nats-py (its own key-value watch, an object a key).  A restart opens the store, resumes at its
cursor and folds what came in between (1 % of the keys, a tenth of that deletes); the peer is the fold from nothing.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import _table
from _fold_stores import ENGINES
from penstock.batch import UpdateBatch
from penstock.fold import AppliedWatch, WatchScope
from penstock.kv import NatsConnection, NatsOptions, StoreConfig
from penstock.kv.nats.bucket import NatsKvStore
from penstock.testing.nats import NatsServer


async def seed(connection: NatsConnection, bucket: NatsKvStore, count: int) -> None:
    client = connection.client
    for n in range(count):
        await client.publish(f"$KV.{bucket.name}.{key_of(n)}", b"x" * 100)
    await client.flush()
    while (await bucket._api.info()).state.messages < count:
        await asyncio.sleep(0.05)


def key_of(n: int) -> str:
    return f"route.svc-{n // 1000:06d}.{n:08d}"


async def change(bucket: NatsKvStore, count: int) -> int:
    """Change one key of a hundred and delete one of a thousand; return how many changes that were."""
    await bucket.writer.put_many((key_of(n), b"y" * 100) for n in range(0, count, 100))
    gone = range(50, count, 1000)
    await asyncio.gather(*(bucket.writer.delete(key_of(n)) for n in gone))
    return len(range(0, count, 100)) + len(gone)


async def hydrate(bucket: NatsKvStore) -> int:
    found = 0
    async with await bucket.watcher.watch_all() as watch:
        while not watch.hydrated:
            found += len(await watch.next_batch())
    return found


async def fold(bucket: NatsKvStore, store: Any = None) -> int:
    """Fold until caught up; return how many changes were delivered."""
    found, stop, last = 0, asyncio.Event(), (await bucket._api.info()).state.last_seq

    def apply(batch: UpdateBatch) -> None:
        nonlocal found
        found += len(batch)

    def applied(cursor: Any) -> None:
        if (cursor.token.as_int() or 0) >= last:
            stop.set()

    await AppliedWatch(
        bucket.watcher, WatchScope.all(), apply=apply, store=store, reader=bucket.reader, on_applied=applied, stop=stop
    ).run()
    return found


async def hydrate_plain(connection: NatsConnection, bucket: NatsKvStore, count: int) -> int:
    plain = await connection.client.jetstream().key_value(bucket.name)
    watcher = await plain.watchall()
    found = 0
    async for entry in watcher:
        found += entry is not None  # None ends the keys there are, but may come first where they arrive very fast
        if found == count:
            break
    await watcher.stop()
    return found


async def hydration(connection: NatsConnection, bucket: NatsKvStore, count: int, repeats: int) -> list[list[str]]:
    async def into(engine: str) -> int:
        with tempfile.TemporaryDirectory() as folder, ENGINES[engine](folder + "/fold") as store:
            return await fold(bucket, store)

    work: dict[str, Callable[[], Awaitable[Any]]] = {
        "watch_all, batches": lambda: hydrate(bucket),
        "watch_applied, no store": lambda: fold(bucket),
        **{f"watch_applied into {engine}": lambda engine=engine: into(engine) for engine in ENGINES},
        "scan": bucket.reader.scan,
        "keys": bucket.reader.keys,
        "nats-py watchall, objects": lambda: hydrate_plain(connection, bucket, count),
    }
    rates = {}
    for name, run in work.items():
        for _ in range(repeats):
            start = time.perf_counter()
            answer = await run()
            seconds = time.perf_counter() - start
            assert (answer if isinstance(answer, int) else len(answer)) == count, name
            rates[name] = max(rates.get(name, 0.0), count / seconds)
    plain = rates["nats-py watchall, objects"]
    return [[name, f"{rate:,.0f}", f"{rate / plain:.1f}"] for name, rate in rates.items()]


async def restarts(bucket: NatsKvStore, count: int) -> list[list[str]]:
    """Return how long each backend takes from opening its store to being caught up, from nothing and resumed."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        full = {}
        for engine, opened in ENGINES.items():
            start = time.perf_counter()
            with opened(f"{folder}/{engine}") as store:
                await fold(bucket, store)
                full[engine] = time.perf_counter() - start
        changes = await change(bucket, count)
        for engine, opened in ENGINES.items():
            start = time.perf_counter()
            with opened(f"{folder}/{engine}") as store:
                ready = time.perf_counter() - start
                delivered = await fold(bucket, store)
                resumed = time.perf_counter() - start
            # History 1: a key that was changed and then deleted comes once.
            assert delivered <= changes
            times = f"{full[engine] / resumed:.0f}"
            rows.append([engine, f"{full[engine]:.2f}", f"{resumed:.3f}", f"{ready:.3f}", f"{delivered:,}", times])
    return rows


async def measure(count: int, repeats: int) -> str:
    with tempfile.TemporaryDirectory() as folder, NatsServer(folder) as server:
        async with NatsConnection(NatsOptions(url=server.url)) as connection:
            bucket = await connection.store_with_config(StoreConfig(name="bench", max_bytes=-1))
            await seed(connection, bucket, count)
            filled = await hydration(connection, bucket, count, repeats)
            restarted = await restarts(bucket, count)
    head = [f"hydration, {count:,} keys", "keys/s", "times nats-py"]
    columns = ["a restart", "from nothing, s", "resumed, s", "of which opening, s", "changes delivered", "times faster"]
    return _table.markdown(head, filled) + "\n\n" + _table.markdown(columns, restarted)


def table(*, quick: bool) -> str:
    return asyncio.run(measure(*((2_000, 1) if quick else (200_000, 3))))
