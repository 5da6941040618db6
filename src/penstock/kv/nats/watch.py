"""Watches of a NATS bucket: one ordered push consumer each, in batches, healed when it breaks.

What must stay true:

1. The inbox is subscribed before the consumer exists, so no message is early.
2. Consumer sequences have no hole.  A hole, a missed heartbeat or a reconnect makes a new consumer behind the
   last revision delivered; before any delivery it starts exactly where the first one did.
3. A resume is checked against the retention window before and after attaching, and a watch of everything is
   checked whenever a revision is skipped, before the batch is handed out, and every 30 s when idle: a server
   starts or goes on behind evicted messages without a word.  Progress is claimed only where nothing can have been
   removed unseen.
4. Flow control is answered when the caller comes back for more, so a slow caller makes the server wait and
   the memory in between is bounded by the server's window.
5. A server that is not heard from is away: ``in_touch`` and the log say so, at the latest after two heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.batch import UpdateBatch
from penstock.errors import ExpiredError, NotConnected, OptionsError, ReplacedError, RetryError
from penstock.kv.nats.api import JetStream, StreamInfo
from penstock.kv.nats.lane import CLOSED_LOOK_SECONDS, Inbox, open_inbox
from penstock.kv.nats.wire import FOREIGN, NS_PER_S, Decoded, decode_messages, says_expired
from penstock.kv.roles import Watch
from penstock.kv.window import resume_start, resume_window_ok

__all__ = ["NatsWatch", "EndedWatch"]

_log = logging.getLogger("penstock.kv")

HEARTBEAT_SECONDS: Final = 5.0
SILENT_HEARTBEATS: Final = 2
"""After so many heartbeats that did not come the server counts as away."""
MISSED_HEARTBEATS: Final = 3
"""After so many the consumer is made again."""
IDLE_PROBE_SECONDS: Final = 30.0
INACTIVE_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 0.2


class EndedWatch(Watch):
    """The watch of no prefix at all: it ends at once.

    >>> EndedWatch().hydrated
    True
    """

    hydrated = True
    lag = 0

    async def next_batch(self, limit: int = 65536) -> UpdateBatch:  # noqa: ARG002
        """End."""
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Do nothing."""


class NatsWatch(Watch):
    """One watch; see the head of this module.  Made by NatsKvWatcher, used by one task.

    >>> NatsWatch(JetStream(lambda: None, "KV_b"), b"$KV.b.", ["$KV.b.>"], None, guarded=True).hydrated
    False
    """

    def __init__(
        self,
        api: JetStream,
        prefix: bytes,
        filters: Sequence[str],
        revision: int | None,
        *,
        guarded: bool,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        probe_seconds: float = IDLE_PROBE_SECONDS,
    ) -> None:
        self._api, self._prefix, self._filters, self._guarded = api, prefix, list(filters), guarded
        self._heartbeat_seconds, self._probe_seconds = heartbeat_seconds, probe_seconds
        self._revision = revision  # where the caller wants to go on; None for the re-list
        self._progress = revision or 0  # every matching revision up to here has been delivered
        self._delivered = revision or 0  # the last revision received in order
        self._handed_out = revision or 0  # the last revision the caller has, or the re-list stands for
        self._heartbeat = 0  # the revision the last heartbeat spoke of
        self._covered = 0  # what the re-list stands for once it is complete
        self._consumer_seq = 0
        self._expected = 0  # messages that waited when the consumer was made
        self._hydrated = False
        self._listing = revision is None  # the consumer delivers the last change of each key, not every change
        self._lag: int | None = None
        self._created = ""
        self._consumer = ""
        self._inbox: Inbox | None = None
        self._owed: list[str] = []  # flow control requests not answered yet
        self._ready: UpdateBatch | None = None
        self._broken = False
        self._reconnects = 0
        self._heard_at = self._probed_at = 0.0
        self._away_since: float | None = None
        self._closed = False
        self.resets = 0
        """How many times the consumer had to be made again."""

    @property
    def hydrated(self) -> bool:
        """Whether the re-list, or the delta behind the cursor, has been delivered completely."""
        return self._hydrated and self._ready is None

    @property
    def lag(self) -> int | None:
        """Changes the server still had for this watch at the last delivery."""
        return self._lag

    @property
    def in_touch(self) -> bool:
        """Whether the server has been heard from lately: the connection stands, and heartbeats come."""
        try:
            return self._away_since is None and bool(self._api.client().is_connected)
        except NotConnected:
            return False

    @property
    def progress(self) -> int:
        """The revision up to which everything that matches was handed out, quiet times included; 0 unknown."""
        return 0 if self._ready is not None else max(self._progress, self._handed_out)

    # --- Attaching

    async def attach(self) -> None:
        """Check the window, make the consumer, and check the window again."""
        info = await self._api.info()
        self._created = info.created
        start = None
        if self._revision is not None:
            start = resume_start(self._revision)
            if start is None:
                raise OptionsError(f"{self._api.stream}: no revision can come after {self._revision}")
            self._check(info, self._revision)
        self._covered = info.state.last_seq
        await self._open(start)
        if start is not None:
            try:
                self._check(await self._api.info(), start - 1)
            except BaseException:
                await self.aclose()
                raise

    async def _open(self, start: int | None) -> None:
        client = self._api.client()
        self._reconnects = client.stats["reconnects"]
        inbox = await open_inbox(client)
        try:
            self._consumer, self._expected = await self._api.create_consumer(self._config(inbox.subject, start))
        except BaseException as exc:
            await inbox.close()
            if isinstance(exc, RetryError) and start is not None and says_expired(str(exc)):
                first = (await self._api.info()).state.first_seq
                raise ExpiredError(self._api.stream, start - 1, first) from exc
            raise
        self._inbox, self._consumer_seq, self._broken, self._owed = inbox, 0, False, []
        self._listing = start is None
        self._heard_at = self._probed_at = asyncio.get_running_loop().time()
        if not self._expected:
            self._hydrate()

    def _config(self, subject: str, start: int | None) -> dict[str, Any]:
        config: dict[str, Any] = {
            "deliver_subject": subject,
            "deliver_policy": "last_per_subject" if start is None else "by_start_sequence",
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "flow_control": True,
            "idle_heartbeat": int(self._heartbeat_seconds * NS_PER_S),
            "inactive_threshold": int(INACTIVE_SECONDS * NS_PER_S),
            "mem_storage": True,
            "num_replicas": 1,
        }
        if start is not None:
            config["opt_start_seq"] = start
        if len(self._filters) == 1:
            config["filter_subject"] = self._filters[0]
        else:
            config["filter_subjects"] = self._filters
        return config

    def _check(self, info: StreamInfo, revision: int) -> None:
        """Raise unless this is still the stream, and everything after ``revision`` is still in it."""
        self._check_same(info)
        if info.state.last_seq < revision:
            raise ReplacedError(
                self._api.stream, f"it ends at revision {info.state.last_seq}, before the cursor at {revision}"
            )
        if not resume_window_ok(revision, info.state.first_seq):
            raise ExpiredError(self._api.stream, revision, info.state.first_seq)

    def _check_same(self, info: StreamInfo) -> None:
        if info.created != self._created:
            raise ReplacedError(self._api.stream, f"it was made again at {info.created}")

    # --- Delivering

    async def next_batch(self, limit: int = 65536) -> UpdateBatch:
        """Return the next changes, at least one and at most ``limit``; StopAsyncIteration after aclose."""
        if limit < 1:
            raise OptionsError(f"limit={limit}: must be at least 1")
        while self._ready is None:
            if self._closed:
                raise StopAsyncIteration
            if self._broken:
                await self._reset()
            found = decode_messages(await self._take(), self._prefix)
            try:
                batch = await self._accept(found)
            except BaseException:  # cancelled, too: this run counts as never received
                self._broken = True
                raise
            # From here to the return nothing waits: whoever reads progress sees it before or after.
            if len(batch):
                self._ready = batch
            self._handed_out = self._delivered
            if self._ready is None and not self._broken:  # a heartbeat, and nothing else
                await self._probe(asyncio.get_running_loop().time())
        batch = self._ready
        if len(batch) <= limit:
            self._ready = None
            return batch
        self._ready = batch[limit:]
        return batch[:limit]

    async def _take(self) -> bytes:
        """Return what came, at the latest when something has to be looked at."""
        loop = asyncio.get_running_loop()
        while True:
            inbox = self._inbox
            if inbox is None or self._closed:
                return b""
            await self._pay()
            try:
                data = await inbox.take(min(CLOSED_LOOK_SECONDS, self._heartbeat_seconds))
            except NotConnected:
                if self._inbox is None:  # it was closed by aclose
                    return b""
                raise
            now, client = loop.time(), self._api.client()
            if client.stats["reconnects"] != self._reconnects:
                self._broken = True  # what the server sent in between is lost
            if data:
                self._heard_at = now
                self._is_back(now)
                return data
            if not client.is_connected or now - self._heard_at > SILENT_HEARTBEATS * self._heartbeat_seconds:
                self._is_away(now)
            if client.is_connected and now - self._heard_at > MISSED_HEARTBEATS * self._heartbeat_seconds:
                self._broken = True
            if self._broken:
                return b""
            await self._probe(now)

    async def _probe(self, now: float) -> None:
        """When idle, look now and then what retention has done.

        A watch of everything learns whether it was overrun.  A watch of prefixes learns that nothing was removed
        since its last progress, so whatever the server has passed over did not concern it; if something was
        removed it stands still, and the next resume finds out.
        """
        if not self._hydrated or now - self._probed_at < self._probe_seconds:
            return
        self._probed_at = now
        passed = self._heartbeat
        try:
            info = await self._api.info()
        except RetryError:
            return  # not connected: the reset after the reconnect checks the same
        if self._guarded:
            self._check(info, self._delivered)
        elif info.created == self._created and resume_window_ok(self.progress, info.state.first_seq):
            self._progress = max(self.progress, passed)

    async def _pay(self) -> None:
        owed, self._owed = self._owed, []
        for subject in owed:
            try:
                await self._api.client().publish(subject, b"")
            except Exception:  # noqa: BLE001 - not connected: the reset after the reconnect makes it moot
                self._broken = True

    async def _accept(self, found: Decoded) -> UpdateBatch:
        """Check a run and return what of it is new."""
        count = self._ordered(found)
        keep = np.zeros(len(found), np.bool_)
        keep[:count] = (found.ops[:count] != FOREIGN) & (
            ~found.known[:count] | (found.sequences[:count] > np.uint64(self._delivered))
        )
        known = found.known[:count]
        if known.any():
            if not await self._guarded_run(found, count):
                return UpdateBatch.of([])
            self._delivered = max(self._delivered, int(found.sequences[:count][known].max()))
            self._lag = max(0, int(found.pending[:count][known][-1]))
            if self._lag == 0 or self._consumer_seq >= self._expected:
                self._hydrate()
        return found.updates(keep)

    def _ordered(self, found: Decoded) -> int:
        """Return how many messages come before the first hole, and take note of the status messages."""
        ahead = self._consumer_seq
        expected = ahead + 1 + np.arange(len(found), dtype=np.uint64)
        wrong = np.flatnonzero((found.consumer_sequences != expected) & found.known)
        count = int(wrong[0]) if len(wrong) else len(found)
        self._broken |= count < len(found)
        self._consumer_seq = ahead + count
        for row, reply, headers in found.controls:
            if headers.get("Status") != "100":  # the consumer was deleted, or its leader has changed
                self._broken = True
            elif "Nats-Last-Consumer" in headers:
                if headers["Nats-Last-Consumer"] != str(ahead + row):
                    self._broken = True
                elif self._hydrated and row == len(found) and headers.get("Nats-Last-Stream", "").isdigit():
                    self._heartbeat = int(headers["Nats-Last-Stream"])
                if stalled := headers.get("Nats-Consumer-Stalled"):
                    self._owed.append(stalled)
            elif reply:
                self._owed.append(reply)
        return count

    async def _guarded_run(self, found: Decoded, count: int) -> bool:
        """If the run skips a revision, ask whether retention removed it, before anything is handed out.

        False when nobody answered: the run counts as never received, and a new consumer delivers it again.
        """
        if not self._guarded or (self._listing and not self._hydrated):
            return True  # a re-list skips what was overwritten, so its gaps say nothing
        sequences: NDArray[np.uint64] = found.sequences[:count][found.known[:count]]
        before = np.concatenate(([np.uint64(self._delivered)], sequences[:-1]))
        gaps = np.flatnonzero(sequences > before + np.uint64(1))
        if len(gaps):  # the earliest gap decides: what passes there passes at every later one
            self._probed_at = asyncio.get_running_loop().time()
            try:
                info = await self._api.info()
            except RetryError:
                self._broken = True
                return False
            self._check(info, int(before[gaps[0]]))
        return True

    def _hydrate(self) -> None:
        if not self._hydrated:
            self._hydrated = True
            if self._revision is None:
                self._delivered = max(self._delivered, self._covered)
            self._lag = self._lag or 0

    # --- Healing and ending

    async def _reset(self) -> None:
        """Make a new consumer behind the last revision delivered, waiting for the connection if need be."""
        await self._drop()
        while not self._closed:
            client = self._api.client()
            if client.is_closed:
                raise NotConnected(f"nats: {self._api.stream}: the connection was closed")
            try:
                if client.is_connected:
                    info = await self._api.info()
                    delivered = max(self._progress, self._delivered)
                    fresh = delivered == 0 and self._revision is None
                    self._check_same(info)
                    if fresh:
                        self._covered = info.state.last_seq
                    else:
                        self._check(info, delivered)
                    await self._open(None if fresh else resume_start(delivered))
                    self._broken = True  # until it is checked, also for who comes after one that was cancelled
                    if not fresh:
                        self._check(await self._api.info(), delivered)
                    self._broken = False
                    self.resets += 1
                    self._is_back(asyncio.get_running_loop().time())
                    return
            except RetryError:
                await self._drop()  # the consumer may be there and its check not
            self._is_away(asyncio.get_running_loop().time())
            await asyncio.sleep(RETRY_SECONDS)

    def _is_away(self, now: float) -> None:
        if self._away_since is None:
            self._away_since = min(now, self._heard_at)
            silent = now - self._heard_at
            _log.warning("nats: %s: the server is away, last heard from %.1f s ago", self._api.stream, silent)

    def _is_back(self, now: float) -> None:
        if self._away_since is not None:
            away, self._away_since = now - self._away_since, None
            _log.warning("nats: %s: the server is back after %.1f s", self._api.stream, away)

    async def _drop(self) -> None:
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            await inbox.close()
            await self._api.delete_consumer(self._consumer)

    async def aclose(self) -> None:
        """End the watch and remove its consumer."""
        if not self._closed:
            self._closed = True
            self._ready = None
            await self._drop()
