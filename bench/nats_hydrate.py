"""How fast does a watch hydrate from a real nats-server on loopback?

n keys of 28 bytes with 100-byte values; the watch delivers them in batches.  Beside it the documented way of
nats-py (its own key-value watch, an object a key), and a scan and a key listing of the same bucket.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time

from penstock.batch import UpdateBatch
from penstock.fold import AppliedWatch, WatchScope
from penstock.kv import NatsConnection, NatsOptions, StoreConfig
from penstock.kv.nats import NatsKvStore
from penstock.testing.nats import NatsServer


async def seed(connection: NatsConnection, store: NatsKvStore, count: int) -> None:
    client = connection.client
    for n in range(count):
        await client.publish(f"$KV.{store.name}.route.svc-{n // 1000:06d}.{n:08d}", b"x" * 100)
    await client.flush()
    while (await store._api.info()).state.messages < count:
        await asyncio.sleep(0.05)


async def hydrate(store: NatsKvStore) -> int:
    found = 0
    async with await store.watcher.watch_all() as watch:
        while not watch.hydrated:
            found += len(await watch.next_batch())
    return found


async def hydrate_fold(store: NatsKvStore) -> int:
    found, stop = 0, asyncio.Event()

    def apply(batch: UpdateBatch) -> None:
        nonlocal found
        found += len(batch)
        if found == total:
            stop.set()

    total = (await store._api.info()).state.messages
    await AppliedWatch(store.watcher, WatchScope.all(), apply=apply, stop=stop).run()
    return found


async def hydrate_plain(connection: NatsConnection, store: NatsKvStore) -> int:
    bucket = await connection.client.jetstream().key_value(store.name)
    watcher = await bucket.watchall()
    found = 0
    async for entry in watcher:
        if entry is None:
            break
        found += 1
    await watcher.stop()
    return found


async def measure(count: int, repeats: int) -> list[tuple[str, float]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder, NatsServer(folder) as server:
        async with NatsConnection(NatsOptions(url=server.url)) as connection:
            store = await connection.store_with_config(StoreConfig(name="bench", max_bytes=-1))
            await seed(connection, store, count)
            work = {
                "watch_all, batches": lambda: hydrate(store),
                "watch_applied, no store": lambda: hydrate_fold(store),
                "nats-py watchall, objects": lambda: hydrate_plain(connection, store),
                "scan": store.reader.scan,
                "keys": store.reader.keys,
            }
            for name, run in work.items():
                best = 0.0
                for _ in range(repeats):
                    start = time.perf_counter()
                    answer = await run()
                    seconds = time.perf_counter() - start
                    assert (answer if isinstance(answer, int) else len(answer)) == count, name
                    best = max(best, count / seconds)
                rows.append((name, best))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 000 keys, once")
    parser.add_argument("--write", action="store_true", help="accepted for make bench; the table goes to stdout")
    options = parser.parse_args()
    count, repeats = (2_000, 1) if options.quick else (200_000, 3)
    rows = asyncio.run(measure(count, repeats))
    print(f"| {count} keys, 100-byte values | keys/s |\n|---|---|")
    for name, rate in rows:
        print(f"| {name} | {rate:,.0f} |")


if __name__ == "__main__":
    main()
