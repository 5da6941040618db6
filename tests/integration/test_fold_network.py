"""A fold of a real bucket through a network that is cut, stalls and comes back.

The fold goes through a TcpProxy; the test writes to the server directly.  Whatever the network does: the store is
exact at its cursor, the cursor is never ahead of it, and what is delivered after healing is the delta only.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.batch import UpdateBatch
from penstock.errors import NotConnected
from penstock.fold import AppliedWatch, BatchConfig, WatchScope
from penstock.kv import NatsConnection, NatsOptions, StoreConfig
from penstock.kv.nats.bucket import NatsKvStore
from penstock.kv.nats.watch import NatsWatch
from penstock.store import AppendLogStore
from penstock.testing.nats import NatsServer
from penstock.testing.proxy import TcpProxy

KEYS = 3_000
BUCKET = "routes"
State = dict[str, tuple[bytes, int | None]]

# nats-py leaves the writer of a dial that failed unclosed.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(str(tmp_path)) as running:
        yield running


@pytest.fixture
def proxy(server: NatsServer) -> Iterator[TcpProxy]:
    with TcpProxy(server.port) as between:
        yield between


@pytest.fixture
async def bucket(server: NatsServer) -> AsyncIterator[NatsKvStore]:
    """The bucket without a proxy: what the test writes and compares with."""
    async with NatsConnection(NatsOptions(url=server.url)) as connection:
        yield await connection.store_with_config(StoreConfig(name=BUCKET))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missed heartbeats are noticed within a second instead of fifteen."""
    monkeypatch.setitem(NatsWatch.__init__.__kwdefaults__, "heartbeat_seconds", 0.2)


class Fold:
    """A fold through the proxy, with a store on disk, and what was delivered to it."""

    def __init__(self, store: AppendLogStore, bucket: NatsKvStore, scope: WatchScope) -> None:
        self.store, self.stop = store, asyncio.Event()
        self.delivered: Counter[tuple[str, int | None]] = Counter()
        self.run = AppliedWatch(
            bucket.watcher, scope, apply=self._apply, store=store, reader=bucket.reader,
            on_applied=self._check, config=BatchConfig(window_seconds=0.002, max_updates=500), stop=self.stop,
        )  # fmt: skip
        self.task = asyncio.create_task(self.run.run())

    def _apply(self, batch: UpdateBatch) -> None:
        self.delivered.update((update.key, update.version.as_int()) for update in batch)

    def _check(self, cursor: Any) -> None:
        # What is reported is in the store, and the store claims nothing that it does not hold.
        assert (self.cursor or 0) >= (cursor.token.as_int() or 0)

    @property
    def cursor(self) -> int | None:
        return self.store.cursor().token.as_int()

    @property
    def watch(self) -> NatsWatch:
        assert isinstance(self.run._watch, NatsWatch)
        return self.run._watch

    def state(self) -> State:
        return {entry.key: (entry.value, entry.version.as_int()) for entry in self.store.range()}

    async def until(self, condition: Any, seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not condition() and not self.task.done():
                await asyncio.sleep(0.005)
        if self.task.done():
            self.task.result()


@contextlib.asynccontextmanager
async def folding(path: Path, proxy: TcpProxy, scope: WatchScope | None = None) -> AsyncIterator[Fold]:
    options = NatsOptions(url=f"nats://127.0.0.1:{proxy.port}", ping_seconds=0.3)
    with AppendLogStore.open(path) as store:
        async with NatsConnection(options) as connection:
            bucket = await connection.store(BUCKET)
            bucket._api.seconds = 3.0  # what gets no answer is soon tried again
            fold = Fold(store, bucket, scope or WatchScope.all())
            try:
                yield fold
            finally:
                fold.stop.set()
                async with asyncio.timeout(60):
                    await fold.task
    gc.collect()  # so that those writers go while the warning is expected


@contextlib.asynccontextmanager
async def losing_the_network(folder: Path, proxy: TcpProxy, trouble: str, after: int) -> AsyncIterator[Fold]:
    """A fold that has lost its network in the middle of hydration.

    A busy server may send all those bytes before it answers who asked for them; then nothing was begun, and it takes
    another attempt.
    """
    for attempt in range(10):
        away(proxy, trouble, after)
        async with folding(folder / f"fold-{attempt}.snap", proxy) as fold:
            assert await asyncio.to_thread(proxy.broken)
            try:
                await fold.until(lambda: fold.cursor is not None, 5)
            except TimeoutError:
                back(proxy, trouble)
                continue
            yield fold
            return
    raise AssertionError("the server never answers before it sends")


async def live(bucket: NatsKvStore, prefix: str = "") -> State:
    return {entry.key: (entry.value, entry.version.as_int()) for entry in await bucket.reader.entries(prefix)}


async def last_revision(bucket: NatsKvStore) -> int:
    return (await bucket._api.info()).state.last_seq


async def fill(bucket: NatsKvStore, count: int = KEYS) -> None:
    await bucket.writer.put_many((f"k.{n:05d}", b"%06d" % n * 16) for n in range(count))


async def change(bucket: NatsKvStore, rng: random.Random, count: int, keys: int = KEYS) -> None:
    """Put, delete, purge, and delete and put again."""
    for _ in range(count):
        key = f"k.{rng.randrange(keys):05d}"
        what = rng.randrange(4)
        if what == 1:
            await bucket.writer.purge(key)
        elif what > 1:
            await bucket.writer.delete(key)
        if what in (0, 3):
            await bucket.writer.put(key, rng.randbytes(20))


async def exact_at_its_cursor(fold: Fold, bucket: NatsKvStore) -> None:
    """Nothing in the store is newer than its cursor, and nothing untouched below it is missing."""
    state, cursor = fold.state(), fold.cursor or 0
    assert all((revision or 0) <= cursor for _, revision in state.values())
    untouched = {key: value for key, value in (await live(bucket)).items() if (value[1] or 0) <= cursor}
    assert untouched.items() <= state.items()


async def caught_up(fold: Fold, bucket: NatsKvStore) -> None:
    last = await last_revision(bucket)
    await fold.until(lambda: (fold.cursor or 0) >= last)
    assert fold.state() == await live(bucket)
    assert fold.cursor == last


# How the network goes away, and how it comes back.
TROUBLES = ["cut", "stall", "stall, and the old connection stays dead"]


def away(proxy: TcpProxy, trouble: str, after: int = 0) -> None:
    (proxy.cut if trouble == "cut" else proxy.stall)(after)


def back(proxy: TcpProxy, trouble: str) -> None:
    proxy.heal(old="dead" if trouble.endswith("dead") else "flow")


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_network_lost_in_the_middle_of_hydration(
    tmp_path: Path, proxy: TcpProxy, bucket: NatsKvStore, trouble: str
) -> None:
    rng = random.Random(trouble)
    await fill(bucket)
    await change(bucket, rng, 100)
    expected = len(await live(bucket))
    async with losing_the_network(tmp_path, proxy, trouble, after=150_000) as fold:  # of about half a megabyte
        await change(bucket, rng, 100)
        await fold.until(lambda: not fold.watch._api.client().is_connected)  # it has noticed
        assert not fold.run.hydrated
        assert 0 < len(fold.delivered) < expected
        await exact_at_its_cursor(fold, bucket)
        back(proxy, trouble)
        await caught_up(fold, bucket)
        assert fold.run.resyncs == 0
        assert fold.watch.resets >= 1
        assert max(fold.delivered.values()) == 1  # it went on where it was: nothing came twice


@pytest.mark.parametrize(
    ("trouble", "scope"),
    [*((trouble, WatchScope.all()) for trouble in TROUBLES), ("cut", WatchScope.of(["k.", "x."]))],
)
async def test_a_network_lost_in_the_middle_of_live_updates(
    tmp_path: Path, proxy: TcpProxy, bucket: NatsKvStore, trouble: str, scope: WatchScope
) -> None:
    rng = random.Random(trouble)
    await fill(bucket, 500)
    async with folding(tmp_path / "fold.snap", proxy, scope) as fold:
        await fold.until(lambda: fold.run.hydrated and fold.cursor == 500)
        writing = asyncio.create_task(change(bucket, rng, 600, 500))
        away(proxy, trouble, after=20_000)
        assert await asyncio.to_thread(proxy.broken)
        await writing
        before, behind = sum(fold.delivered.values()), await last_revision(bucket)
        await exact_at_its_cursor(fold, bucket)
        assert fold.cursor is not None
        assert fold.cursor < behind
        back(proxy, trouble)
        await caught_up(fold, bucket)
        assert fold.run.resyncs == 0
        assert max(fold.delivered.values()) == 1
        assert sum(fold.delivered.values()) - before <= behind - 500
    # A new fold with the same store gets only what comes from now on.
    await change(bucket, rng, 1, 500)
    async with folding(tmp_path / "fold.snap", proxy, scope) as again:
        await caught_up(again, bucket)
        assert sum(again.delivered.values()) <= 2


async def test_a_network_that_comes_and_goes(tmp_path: Path, proxy: TcpProxy, bucket: NatsKvStore) -> None:
    rng = random.Random(9)
    await fill(bucket, 2_000)
    ended = False

    async def write() -> None:
        while not ended:
            await change(bucket, rng, 20, 2_000)
            await asyncio.sleep(0.01)

    writing = asyncio.create_task(write())
    async with folding(tmp_path / "fold.snap", proxy) as fold:
        await fold.until(lambda: fold.cursor is not None)
        for _ in range(6):
            trouble = rng.choice(TROUBLES)
            away(proxy, trouble, after=rng.randrange(100_000))
            await asyncio.to_thread(proxy.broken, 0.5)
            await asyncio.sleep(rng.random() * 0.6)
            back(proxy, trouble)
            await asyncio.sleep(rng.random() * 0.4)
        ended = True
        await writing
        await caught_up(fold, bucket)
        assert fold.run.resyncs == 0
        assert max(fold.delivered.values()) == 1


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_fold_that_starts_while_the_network_is_away(
    tmp_path: Path, proxy: TcpProxy, bucket: NatsKvStore, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(bucket, 500)
    options = NatsOptions(url=f"nats://127.0.0.1:{proxy.port}", ping_seconds=0.3)
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        async with NatsConnection(options) as connection:
            remote = await connection.store(BUCKET)
            away(proxy, trouble)
            patience, remote._api.seconds = remote._api.seconds, 0.5  # as long as no answer can come
            fold = Fold(store, remote, WatchScope.all())
            await change(bucket, random.Random(trouble), 50, 500)
            await fold.until(lambda: caplog.text.count("it is tried again") >= 2)
            assert fold.cursor is None
            remote._api.seconds = patience
            back(proxy, trouble)
            await caught_up(fold, bucket)
            assert max(fold.delivered.values()) == 1
            fold.stop.set()
            await fold.task
            away(proxy, trouble)
            late = Fold(store, remote, WatchScope.all())
            await asyncio.sleep(0.1)
            await connection.shutdown()
            with pytest.raises(NotConnected):  # there is nothing to wait for any more
                async with asyncio.timeout(60):
                    await late.task
    gc.collect()


@pytest.mark.parametrize("hydrated", [False, True])
async def test_history_lost_while_the_network_is_away_is_repaired(
    tmp_path: Path, proxy: TcpProxy, bucket: NatsKvStore, hydrated: bool
) -> None:
    """Keys deleted without a trace, and one deleted and made again, while the fold hears nothing."""
    await fill(bucket)
    fold: Fold
    async with (
        folding(tmp_path / "fold.snap", proxy)
        if hydrated
        else losing_the_network(tmp_path, proxy, "stall", after=150_000)  # a cut takes what has not been read with it
    ) as fold:
        if hydrated:
            await fold.until(lambda: fold.run.hydrated and fold.cursor == KEYS)
        else:
            await fold.until(lambda: (fold.cursor or 0) > 500)
            assert not fold.run.hydrated
        proxy.cut()
        for n in range(300):
            await bucket.writer.delete(f"k.{n:05d}")
        await bucket.writer.put("k.00007", b"back")
        await bucket._api.call(f"STREAM.PURGE.{bucket._api.stream}", {"seq": KEYS + 250})
        assert (fold.cursor or 0) <= KEYS
        proxy.heal()
        last = await last_revision(bucket)
        await fold.until(lambda: (fold.cursor or 0) >= last and fold.run.hydrated)
        assert fold.run.resyncs == 1
        assert fold.state() == await live(bucket)
        assert fold.state()["k.00007"][0] == b"back"
        assert "k.00008" not in fold.state()


async def test_a_server_that_restarts_in_the_middle_of_hydration(
    tmp_path: Path, server: NatsServer, proxy: TcpProxy, bucket: NatsKvStore
) -> None:
    await fill(bucket)
    await bucket.writer.delete("k.00001")
    proxy.stall(after=150_000)
    async with folding(tmp_path / "fold.snap", proxy) as fold:
        assert await asyncio.to_thread(proxy.broken)
        server.stop()
        server.start()
        proxy.heal()
        async with asyncio.timeout(60):
            while not bucket._api.client().is_connected or bucket._api.client().stats["reconnects"] == 0:
                await asyncio.sleep(0.02)
        await bucket.writer.delete("k.00002")
        await caught_up(fold, bucket)
        assert max(fold.delivered.values()) == 1
        assert fold.run.resyncs == 0
