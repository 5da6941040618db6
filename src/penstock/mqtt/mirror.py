"""Mirrors: the keys of a bucket as retained topics, retained topics as keys of a bucket, or both.

What is compared is the state of both sides and what they last agreed on (a small store beside the broker's state), so
it does not matter which changes were missed while this process or the bucket was away, and there is no echo: what one
side has already is not written again.

    bucket   topic   agreed     then
    A        A       any        they agree on A
    B        A       A          the bucket has changed: the topic becomes B
    A        B       A          the topic has changed: the key becomes B, unless someone was faster
    B        C       A          both have: the bucket wins

Nothing counts as a value here: a key that is deleted clears its topic, a topic that is cleared deletes its key.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from penstock.disk import in_disk_thread
from penstock.disk.plain import make_folders
from penstock.errors import ConflictError, OptionsError, PenstockError, UnsupportedError
from penstock.kernel.mqtt import make_run
from penstock.kv import EmbeddedConnection, KvConnection, KvStore, NatsConnection, NatsOptions, StoreConfig
from penstock.lifecycle import Health, Life, State
from penstock.mqtt.inlet import Inlet
from penstock.mqtt.topics import is_filter
from penstock.store import AppendLogStore
from penstock.types import KvEntry, KvUpdate, WatchCursor

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker

__all__ = ["Mirror", "MirrorSpec", "key_of", "text_of"]

_log = logging.getLogger(__name__)

RETRY_SECONDS: Final = (0.1, 5.0)
AGREED: Final = 256
"""Agreements that are written together."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PLAIN: Final = frozenset("-/_.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")


def key_of(text: str) -> str:
    """Return the key for a topic: what a key cannot hold is written as ``=XX``.

    >>> key_of("plant/7"), key_of("a b"), key_of(".a..b."), key_of("a=b")
    ('plant/7', 'a=20b', '=2Ea.=2Eb=2E', 'a=3Db')
    """
    out: list[str] = []
    for at, sign in enumerate(text):
        if sign not in _PLAIN or (sign == "." and (at in (0, len(text) - 1) or text[at - 1] == ".")):
            out.append("".join(f"={byte:02X}" for byte in sign.encode()))
        else:
            out.append(sign)
    return "".join(out)


def text_of(key: str) -> str | None:
    """Return the topic for a key; None for a key that no topic has.

    >>> text_of("a=20b"), text_of("a=b"), text_of("plant.7")
    ('a b', None, 'plant.7')
    """
    try:
        raw = re.sub(rb"=([0-9A-F]{2})", lambda found: bytes.fromhex(found[1].decode()), key.encode()).decode()
    except UnicodeDecodeError:
        return None
    return raw if key_of(raw) == key and "\0" not in raw and "+" not in raw and "#" not in raw else None


class MirrorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mirror, as a table ``[[mirrors]]`` of a configuration says it.

    >>> MirrorSpec(place="data/buckets", bucket="devices", prefix="state/").direction
    'both'
    """

    place: str
    """A folder of embedded buckets, or nats://… with credentials from the environment."""
    bucket: str
    prefix: str = ""
    """Key ``k`` is the topic ``prefix`` + ``k``."""
    direction: Literal["both", "to_topics", "to_bucket"] = "both"
    name: str = ""
    """The name of the bucket unless given."""
    qos: int = 1

    def __post_init__(self) -> None:
        if self.direction not in ("both", "to_topics", "to_bucket"):
            raise OptionsError(f"direction={self.direction!r}: must be both, to_topics or to_bucket")
        if not is_filter(self.prefix + "#") or "+" in self.prefix or self.prefix.startswith("$"):
            raise OptionsError(f"prefix={self.prefix!r}: the beginning of topics, such as 'state/'")
        if self.qos not in (0, 1, 2):
            raise OptionsError(f"qos={self.qos}: must be 0, 1 or 2")
        if self.name and not NAME.fullmatch(self.name):
            raise OptionsError(f"a mirror named {self.name!r}: letters, digits, dot, dash and underscore")


class Mirror:
    """One mirror of one broker; a part (penstock.lifecycle).  ``data`` is the folder all mirrors of the broker share.

    >>> from penstock.mqtt.broker import Broker
    >>> mirror = Mirror(MirrorSpec(place="data/buckets", bucket="devices"), Broker(), "data/mirrors")
    >>> mirror.name, mirror.health().state.value
    ('mirror:devices', 'new')
    """

    def __init__(self, spec: MirrorSpec, broker: Broker, data: str) -> None:
        self.spec, self.broker = spec, broker
        self.name = f"mirror:{spec.name or spec.bucket}"
        self.to_topics = self.to_bucket = self.passed = 0
        self._path = os.path.join(data, f"{spec.name or spec.bucket}.snap")
        self._prefix = spec.prefix.encode()
        self._inlet = Inlet(broker, self.name)
        self._life = Life(self.name)
        self._dirty: dict[str, None] = {}
        self._some = asyncio.Event()
        self._ready = asyncio.Event()
        self._connection: KvConnection | None = None
        self._store: KvStore | None = None
        self._agreed: AppendLogStore | None = None
        self._news: deque[KvUpdate] = deque()
        self._working = self._settling = False

    # --- Life

    async def start(self) -> None:
        """Open what was agreed and begin; the bucket need not be there yet."""
        self._life.state = State.STARTING
        await in_disk_thread(self._open)
        self.broker.on_retained.append(self._retained)
        self._life.state = State.READY
        self._life.work(self._watch(), name=f"{self.name} watch")
        self._life.work(self._work())

    def _open(self) -> None:
        make_folders(os.path.dirname(os.path.abspath(self._path)))
        if not self.broker.journal.keeps:  # topics are forgotten with the process, so nothing was agreed
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._path)
        self._agreed = AppendLogStore.open(self._path)

    async def ready(self) -> None:
        """Return when both sides agreed once."""
        await self._ready.wait()

    async def drain(self, seconds: float) -> None:
        """Carry what has changed, within that time."""
        if not self._life.state.serves:
            return
        self._life.state = State.DRAINING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.settled()

    async def settled(self) -> None:
        """Return when nothing that is known to differ is left."""
        while self._dirty or self._working:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """End; the next start compares both sides again."""
        if self._retained in self.broker.on_retained:
            self.broker.on_retained.remove(self._retained)
        await self._life.cancel()
        if self._connection is not None:
            await self._connection.shutdown()
            self._connection = None
        if self._agreed is not None:
            await self._note()
            self._agreed.close()
            self._agreed = None
        self._life.end()
        self._ready.set()

    async def wait(self) -> None:
        """Return when it has stopped; raises what made it fail."""
        await self._life.wait()

    def health(self) -> Health:
        """Return how it is: degraded while the bucket is away."""
        return self._life.health()

    def describe(self) -> dict[str, Any]:
        """Return what there is to say about it, ready for JSON."""
        return {
            "bucket": self.spec.bucket,
            "prefix": self.spec.prefix,
            "direction": self.spec.direction,
            "to_topics": self.to_topics,
            "to_bucket": self.to_bucket,
            "passed": self.passed,
            "waiting": len(self._dirty),
        }

    # --- What changes

    def _retained(self, topic: bytes) -> None:
        if topic.startswith(self._prefix) and len(topic) > len(self._prefix) and topic[:1] != b"$":
            self._mark(key_of(topic[len(self._prefix) :].decode()))

    def _mark(self, key: str) -> None:
        self._dirty[key] = None
        self._some.set()

    async def _watch(self) -> None:
        pause, longest = RETRY_SECONDS
        while True:
            try:
                store = await self._bucket()
                if store.watcher is None:
                    raise UnsupportedError(f"{store.name}: this backend cannot watch")
                async with await store.watcher.watch_all() as watch:
                    self._mark_everything()
                    self._life.reason, pause = "", RETRY_SECONDS[0]
                    while True:
                        if watch.hydrated and not self._settling:
                            self._settling = True
                            self._life.work(self._become_ready(), name=f"{self.name} ready", forever=False)
                        for update in await watch.next_batch():
                            self._mark(update.key)
            except (PenstockError, OSError, StopAsyncIteration) as exc:
                self._trouble(str(exc) or "the watch ended")
            await asyncio.sleep(pause)
            pause = min(pause * 2, longest)

    async def _become_ready(self) -> None:
        await self.settled()
        self._ready.set()

    def _mark_everything(self) -> None:
        """Look at all that is retained or was agreed on: what the bucket has comes from the watch."""
        assert self._agreed is not None
        for batch in self._agreed.scan():
            for update in batch:
                self._mark(update.key)
        for kept in self.broker.retained.match(self.spec.prefix + "#"):
            if kept.run is not None:
                self._retained(kept.run.topic)

    async def _bucket(self) -> KvStore:
        if self._store is None:
            spec = self.spec
            connection: KvConnection = (
                NatsConnection(NatsOptions.from_environment(spec.place, os.environ))
                if spec.place.startswith(("nats://", "tls://"))
                else EmbeddedConnection(spec.place)
            )
            await connection.connect()
            self._connection = connection
            self._store = await connection.store_with_config(StoreConfig(name=spec.bucket))
        return self._store

    def _trouble(self, reason: str) -> None:
        if reason != self._life.reason:
            _log.warning("%s: %s", self.name, reason)
        self._life.reason = reason

    # --- The work

    async def _work(self) -> None:
        pause, longest = RETRY_SECONDS
        while True:
            if not self._dirty and self._news:
                await self._note()
            if not self._dirty:
                self._working = False
                self._some.clear()
                await self._some.wait()
            self._working = True
            key = next(iter(self._dirty))
            del self._dirty[key]
            try:
                await self._compare(key)
                pause = RETRY_SECONDS[0]
            except ConflictError:
                self._mark(key)  # someone was faster: compare again
            except (PenstockError, OSError) as exc:
                self._trouble(str(exc))
                self._mark(key)
                await asyncio.sleep(pause)
                pause = min(pause * 2, longest)
            if len(self._news) >= AGREED:
                await self._note()

    async def _compare(self, key: str) -> None:
        text = text_of(key)
        if text is None or not text:
            self.passed += 1
            return
        topic = self._prefix + text.encode()
        store = await self._bucket()
        entry = await store.reader.entry(key)  # a tombstone too: it has a version
        there = entry.value if entry is not None and entry.value else None
        run = self.broker.retained.get(topic)
        here = None if run is None else run.payload()
        if here == there:
            self._agree(key, here)
            return
        bucket_changed = _digest(there) != self._known(key)
        direction = self.spec.direction
        if direction == "to_topics" or (direction == "both" and bucket_changed):
            run = make_run(topic, [there or b""], self.spec.qos, True)
            if not (self.broker.is_retainable(topic) and self.broker.journal.can_retain(run)):
                self._pass(key, "the broker cannot retain it")
                return
            await self._inlet.publish([run])
            self.to_topics += 1
            self._agree(key, there)
        else:
            try:
                await self._write(store, key, here, entry)
            except OptionsError as exc:  # too long, too large: the bucket will never take it
                self._pass(key, str(exc))
                return
            self.to_bucket += 1
            self._agree(key, here)

    def _pass(self, key: str, reason: str) -> None:
        _log.warning("%s: %r is passed over: %s", self.name, key[:80], reason)
        self.passed += 1

    async def _write(self, store: KvStore, key: str, value: bytes | None, entry: KvEntry | None) -> None:
        if store.writer is None:
            raise UnsupportedError(f"{store.name}: this backend cannot write")
        if entry is None:
            if value is not None:
                await store.writer.create(key, value)
        elif value is None:
            await store.writer.delete_with_version(key, entry.version)
        else:
            await store.writer.update(key, value, entry.version)

    # --- What was agreed on

    def _known(self, key: str) -> bytes:
        for update in reversed(self._news):
            if update.key == key:
                return update.value
        assert self._agreed is not None
        entry = self._agreed.get(key)
        return b"" if entry is None else entry.value

    def _agree(self, key: str, value: bytes | None) -> None:
        digest = _digest(value)
        if digest != self._known(key):
            self._news.append(KvUpdate.put(key, digest) if digest else KvUpdate.delete(key))

    async def _note(self) -> None:
        news = list(self._news)
        if news and self._agreed is not None:
            await in_disk_thread(self._agreed.apply, news, WatchCursor.of(1))
            self._news.clear()  # only the worker adds to it, and that waits here


def _digest(value: bytes | None) -> bytes:
    return b"" if value is None else hashlib.blake2b(value, digest_size=16).digest()
