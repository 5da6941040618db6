"""Promise: a fold of a real bucket that is killed at any moment is exact at its cursor and resumes with the rest."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kv import NatsConnection, NatsOptions, StoreConfig
from penstock.kv.nats.bucket import NatsKvStore
from penstock.store import AppendLogOptions, AppendLogStore
from penstock.testing.nats import NatsServer

BUCKET = "fleet"
OPTIONS = "AppendLogOptions(unfinished='drop', compact_threshold_bytes=200_000)"

FOLLOWER = f"""
import asyncio, sys
from penstock.fold import AppliedWatch, BatchConfig, WatchScope
from penstock.kv import NatsConnection, NatsOptions, StoreConfig
from penstock.store import AppendLogOptions, AppendLogStore
url, path, until = sys.argv[1], sys.argv[2], int(sys.argv[3])
delivered = 0

def count(batch):
    global delivered
    delivered += len(batch)

async def main():
    store = AppendLogStore.open(path, {OPTIONS})
    stop = asyncio.Event()
    if (store.cursor().token.as_int() or 0) >= until:  # the one before came this far
        return print(0)

    def report(cursor):
        if (cursor.token.as_int() or 0) >= until:
            stop.set()

    async with NatsConnection(NatsOptions(url=url)) as connection:
        bucket = await connection.store_with_config(StoreConfig(name={BUCKET!r}))
        await AppliedWatch(
            bucket.watcher, WatchScope.all(), apply=count, store=store, reader=bucket.reader,
            on_applied=report, config=BatchConfig(window_seconds=0.002), stop=stop,
        ).run()
    store.close()
    print(delivered)

asyncio.run(main())
"""


def start(url: str, path: Path, until: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FOLLOWER, url, str(path), str(until)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def write(bucket: NatsKvStore, rng: random.Random, count: int) -> None:
    """Make ``count`` changes: mostly puts of a few keys, and deletes of some."""
    while count > 0:
        some = min(count, 1000)
        gone = some // 40
        await bucket.writer.put_many(
            (f"k.{rng.randrange(500)}", rng.randbytes(rng.randrange(1, 40))) for _ in range(some - gone)
        )
        await asyncio.gather(*(bucket.writer.delete(f"k.{rng.randrange(500)}") for _ in range(gone)))
        count -= some


async def live(bucket: NatsKvStore) -> dict[str, tuple[bytes, int | None]]:
    return {entry.key: (entry.value, entry.version.as_int()) for entry in await bucket.reader.entries("")}


def folded(path: Path) -> tuple[dict[str, tuple[bytes, int | None]], int]:
    options = AppendLogOptions(unfinished="drop", compact_threshold_bytes=200_000)
    with AppendLogStore.open(str(path), options) as store:
        entries = {entry.key: (entry.value, entry.version.as_int()) for entry in store.range("")}
        return entries, store.cursor().token.as_int() or 0


async def test_a_killed_fold_is_exact_at_its_cursor(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    long = bool(request.config.getoption("--long", default=False))
    rounds, changes = (100, 1_000_000) if long else (4, 4_000)
    rng = random.Random(5)
    path = tmp_path / "fleet.snap"
    with NatsServer(str(tmp_path)) as server:
        async with NatsConnection(NatsOptions(url=server.url)) as connection:
            bucket = await connection.store_with_config(StoreConfig(name=BUCKET))
            previous = 0
            for _ in range(rounds):
                process = start(server.url, path, 1 << 62)
                writing = asyncio.create_task(write(bucket, rng, changes // rounds))
                await asyncio.sleep(0.4 + rng.random() * (2.0 if long else 0.6))
                process.send_signal(signal.SIGKILL)
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
                await writing
                if path.exists():
                    entries, cursor = folded(path)
                    assert cursor >= previous
                    # Nothing of the fold is newer than its cursor; the bucket's untouched keys are all in it.
                    assert all((version or 0) <= cursor for _, version in entries.values())
                    untouched = {k: v for k, v in (await live(bucket)).items() if (v[1] or 0) <= cursor}
                    assert untouched.items() <= entries.items()
                    previous = cursor
            last = (await bucket._api.info()).state.last_seq
            final = start(server.url, path, last)
            output = (await asyncio.to_thread(final.communicate, timeout=120))[0]
            assert final.returncode == 0
            entries, cursor = folded(path)
            assert cursor == last
            assert entries == await live(bucket)
            assert int(output) <= last - previous  # only what came behind the cursor was delivered
