"""The disk budget of a node: an alarm before, then what may go goes first, and refusal at the end.

    ok ──► alarm ──► sacrifice: the oldest segments of channels that allow it ──► full: nothing more is taken

When a store or a log would be full is foretold from how fast it has been growing; when a consumer would lose records,
from how its distance to the oldest record shrinks.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import disk_for, in_disk_thread
from penstock.errors import LockedError, NotFoundError, PenstockError
from penstock.lifecycle import Health, Life, Part, State
from penstock.log.detect import open_log
from penstock.log.messagelog import MessageLog
from penstock.log.sidecar import sidecar_of
from penstock.metrics import REGISTRY
from penstock.mqtt.server import MqttServer
from penstock.node.folding import STORES
from penstock.node.ingest.channel import open_channel_writer
from penstock.node.ingest.server import IngestPart
from penstock.node.options import DiskOptions, NodeChannelOptions, NodeConfig

__all__ = ["BudgetPart", "Level", "Trend", "level_of"]

_log = logging.getLogger("penstock.node")

_used = REGISTRY.gauge("disk_used_bytes", "bytes below the data directory")
_budget = REGISTRY.gauge("disk_budget_bytes", "bytes the node may use")
_free = REGISTRY.gauge("disk_free_bytes", "bytes that are free on the disk of the data directory")
_full_in = REGISTRY.gauge("disk_full_seconds", "when the budget will be used up, +Inf while nothing grows")
_level = REGISTRY.gauge("disk_level", "0 fine, 1 alarm, 2 sacrifice, 3 full: nothing is taken")
_sacrificed = REGISTRY.counter(
    "disk_sacrificed_segments", "segments dropped to keep within the disk budget", labels=("channel",)
)
_loss_in = REGISTRY.gauge(
    "channel_loss_seconds", "when retention takes what a consumer has not read", labels=("channel", "consumer")
)
_channel_full_in = REGISTRY.gauge(
    "channel_full_seconds", "when a channel has max_messages, and retention begins to take records", labels=("channel",)
)
_session_loss = REGISTRY.gauge(
    "session_loss_seconds", "when the queue of an absent session is full; the twenty nearest", labels=("session",)
)

MOST_SESSIONS: Final = 20
MOST_OF_A_CORE: Final = 0.002
"""How much of a processor the walks through the data directory may take, unless a level is about to change."""
WEIGHT: Final = 0.3
"""How much the newest difference counts in a trend."""
Level = Literal["ok", "alarm", "sacrifice", "full"]
LEVELS: Final = ("ok", "alarm", "sacrifice", "full")


class Trend:
    """How fast a number grows, smoothed.

    >>> trend = Trend()
    >>> [trend.note(at, 10.0 * at) for at in (0, 1, 2)][-1] > 0
    True
    >>> round(trend.reaches(100.0))
    8
    """

    def __init__(self) -> None:
        self._at: float | None = None
        self.value = self.rate = 0.0
        self._known = False

    def note(self, at: float, value: float) -> float:
        """Take a new value; return its rate a second."""
        if self._at is not None and at > self._at:
            rate = (value - self.value) / (at - self._at)
            self.rate = self.rate + WEIGHT * (rate - self.rate) if self._known else rate
            self._known = True
        self._at, self.value = at, value
        return self.rate

    def reaches(self, bound: float) -> float:
        """Return in how many seconds it is there; infinity while it does not come nearer."""
        if self.value >= bound:
            return 0.0
        return (bound - self.value) / self.rate if self.rate > 0 else math.inf


def level_of(options: DiskOptions, used: int, free: int) -> tuple[Level, int]:
    """Return how much of the budget is used, as a level, and the budget in bytes.

    >>> level_of(DiskOptions(budget_bytes=100, reserve_bytes=0), 85, 1 << 40)
    ('alarm', 100)
    >>> level_of(DiskOptions(budget_bytes=0, reserve_bytes=50), 100, 40)
    ('full', 90)
    """
    room = max(0, used + free - options.reserve_bytes)
    budget = min(options.budget_bytes or room, room)
    if used >= budget:
        return "full", budget
    part = used / budget
    if part >= options.sacrifice_at:
        return "sacrifice", budget
    return ("alarm" if part >= options.alarm_at else "ok"), budget


class Consumer(msgspec.Struct, frozen=True):
    """How far a consumer of a channel is from losing records.

    >>> Consumer("readings", "ship-ab", 5, None).seconds is None
    True
    """

    channel: str
    consumer: str
    behind: int
    seconds: float | None
    """None: never, as things go now."""


class ChannelRoom(msgspec.Struct, frozen=True):
    """How far a channel is from its bound; from there on each new record costs the oldest.

    >>> ChannelRoom("readings", 90, 100, 5.0).seconds
    5.0
    """

    channel: str
    records: int
    limit: int
    seconds: float | None
    """None: never, as things go now; 0: it is there."""


class BudgetPart:
    """Watches the disk; see penstock.lifecycle.Part.

    >>> BudgetPart(lambda: NodeConfig(data="nowhere"), lambda name: None).name
    'disk'
    """

    name = "disk"

    def __init__(
        self,
        config: Callable[[], NodeConfig],
        part: Callable[[str], Part | None],
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._config, self._part, self._clock = config, part, clock
        self._life = Life(self.name)
        self._growth = Trend()
        self._walk = (0, 0, 0.0)  # what the last walk found used and free, and when the next one is due
        self._margins: dict[tuple[str, str], Trend] = {}
        self._sessions: dict[str, Trend] = {}
        self.level: Level = "ok"
        self.used = self.free = self.budget = 0
        self.sacrificed = 0
        self._records: dict[str, Trend] = {}
        self.channels: list[ChannelRoom] = []
        self.consumers: list[Consumer] = []
        self.sessions: list[dict[str, Any]] = []

    # --- The life of a Part

    async def start(self) -> None:
        """Look for the first time and go on looking."""
        self._life.state = State.STARTING
        await self.look()
        self._life.state = State.READY
        self._life.work(self._run())

    async def _run(self) -> None:
        while True:
            await self._life.pause(self._config().disk.look_seconds)
            if self._life.stopping.is_set():
                return
            await self.look(again=True)

    async def ready(self) -> None:
        """Return at once."""

    async def drain(self, seconds: float) -> None:
        """Go on until the end."""

    async def stop(self) -> None:
        """End."""
        await self._life.finish(None)
        self._life.end()

    async def wait(self) -> None:
        """Return when it has stopped; raises what made it fail."""
        await self._life.wait()

    def health(self) -> Health:
        """Return how it is: degraded from the alarm on."""
        if self._life.state is State.READY and self.level != "ok":
            return Health(State.DEGRADED, self._words())
        return self._life.health()

    def describe(self) -> dict[str, Any]:
        """Return what is used, and when it will be full."""
        return {
            "level": self.level,
            "used_bytes": self.used,
            "budget_bytes": self.budget,
            "free_bytes": self.free,
            "full_seconds": _finite(self._growth.reaches(self.budget)),
            "sacrificed_segments": self.sacrificed,
            "channels": self.channels,
            "consumers": self.consumers,
            "sessions": self.sessions,
        }

    # --- A look

    async def look(self, *, again: bool = False) -> None:
        """Measure, foretell, and act.

        When it looks ``again`` and a walk through all files would cost too much, what the disk has less free than at
        the last one counts as used; a walk is made all the same before a level is left or reached by such a guess.
        """
        config, now = self._config(), self._clock.monotonic()
        guess = await in_disk_thread(self._guess, config.data) if again and now < self._walk[2] else None
        guessed = guess is not None and level_of(config.disk, *guess)[0] == self.level != "full"
        if guess is not None and guessed:
            self.used, self.free = guess
        else:
            self.used, self.free, cost = await in_disk_thread(_measure, config.data)
            self._walk = self.used, self.free, now + cost / MOST_OF_A_CORE
        self._growth.note(self._clock.monotonic(), self.used)
        before, (self.level, self.budget) = self.level, level_of(config.disk, self.used, self.free)
        if LEVELS.index(self.level) > LEVELS.index(before):
            _log.warning("disk: %s", self._words())
        if LEVELS.index(self.level) >= LEVELS.index("sacrifice"):
            await self._sacrifice(config, guessed=guessed)
        ingest = self._part("ingest")
        if isinstance(ingest, IngestPart):
            ingest.refusal = self._words() if self.level == "full" else ""
        broker = self._part("mqtt")
        if isinstance(broker, MqttServer) and broker.kept is not None:
            broker.kept.journal.refusal = self._words() if self.level == "full" else ""
        spans, margins = await in_disk_thread(_spans_and_margins, config)
        self._look_at_channels(spans)
        self._foretell(margins)
        self._look_at_sessions()
        _used.set(self.used)
        _budget.set(self.budget)
        _free.set(self.free)
        _full_in.set(self._growth.reaches(self.budget))
        _level.set(LEVELS.index(self.level))

    def _guess(self, data: str) -> tuple[int, int]:
        """Return what is used, if what the disk has less free since the last walk was used here, and what is free."""
        used, before, _ = self._walk
        free = shutil.disk_usage(data).free
        return max(0, used + before - free), free

    async def _sacrifice(self, config: NodeConfig, *, guessed: bool) -> None:
        """Drop the oldest segments, of the channel with the highest number first, until there is room.

        Those of a channel go at once: a walk for each would let its producers add more meanwhile.  After a guess, which
        others on the disk may have made, one goes, and how many more is measured.
        """
        wanted = int(self.budget * config.disk.sacrifice_at)
        order = sorted((one for one in config.channel if one.sacrifice), key=lambda one: -one.sacrifice)
        for channel in order:
            dropped = 0
            if guessed and self.used > wanted:
                dropped = await self._drop_oldest(channel, config.data, 1)
                if dropped:
                    self.used, self.free, _ = await in_disk_thread(_measure, config.data)
                    guessed = False
            if not guessed and self.used > wanted:
                dropped += await self._drop_oldest(channel, config.data, self.used - wanted)
            if dropped:
                self.sacrificed += dropped
                _sacrificed.add(dropped, channel=channel.name)
                what = "oldest segment" if dropped == 1 else f"{dropped} oldest segments"
                were = "was" if dropped == 1 else "were"
                _log.warning("disk: the %s of channel %s %s given up", what, channel.name, were)
                self.used, self.free, _ = await in_disk_thread(_measure, config.data)
        self.level, self.budget = level_of(config.disk, self.used, self.free)

    async def _drop_oldest(self, options: NodeChannelOptions, data: str, size: int) -> int:
        ingest = self._part("ingest")
        channel = ingest.channels.get(options.name) if isinstance(ingest, IngestPart) else None
        if channel is not None and channel.failure is None:
            return await in_disk_thread(_drop_oldest, channel.writer, size)
        return await in_disk_thread(_drop_in_closed, options, data, size)

    def _foretell(self, margins: list[tuple[str, str, int, int | None]]) -> None:
        now, found, seen = self._clock.monotonic(), [], set()
        losses: dict[tuple[str, ...], float] = {}
        for channel, consumer, behind, margin in margins:
            key = channel, consumer
            seen.add(key)
            trend = self._margins.setdefault(key, Trend())
            seconds = math.inf
            if margin is not None:
                trend.note(now, -margin)
                seconds = trend.reaches(0)
            losses[key] = seconds
            found.append(Consumer(channel, consumer, behind, _finite(seconds)))
        for key in set(self._margins) - seen:
            del self._margins[key]
        self.consumers = found
        _loss_in.replace(losses)

    def _look_at_channels(self, spans: list[tuple[str, int, int]]) -> None:
        now, found = self._clock.monotonic(), []
        fulls: dict[tuple[str, ...], float] = {}
        for channel, records, limit in spans:
            trend = self._records.setdefault(channel, Trend())
            trend.note(now, records)
            fulls[channel,] = seconds = trend.reaches(limit)
            found.append(ChannelRoom(channel, records, limit, _finite(seconds)))
        for channel in set(self._records) - {one.channel for one in found}:
            del self._records[channel]
        self.channels = found
        _channel_full_in.replace(fulls)

    def _look_at_sessions(self) -> None:
        part = self._part("mqtt")
        if not isinstance(part, MqttServer) or not part.health().state.serves:
            return
        now, limit = self._clock.monotonic(), part.options.broker.max_queued_messages
        waiting = heapq.nlargest(MOST_SESSIONS, part.broker.budget.waiting, key=lambda one: one.queued_messages)
        names = {one.client_id for one in waiting}
        for name in set(self._sessions) - names:
            del self._sessions[name]
        self.sessions = []
        losses: dict[tuple[str, ...], float] = {}
        for one in waiting:
            trend = self._sessions.setdefault(one.client_id, Trend())
            trend.note(now, one.queued_messages)
            seconds = trend.reaches(limit)
            losses[one.client_id,] = seconds
            self.sessions.append({"session": one.client_id, "queued": one.queued_messages, "seconds": _finite(seconds)})
        _session_loss.replace(losses)

    def _words(self) -> str:
        part = 100 * self.used / self.budget if self.budget else 100.0
        last = {"full": "; nothing more is taken", "sacrifice": "; the oldest segments go"}.get(self.level, "")
        options, why = self._config().disk, ""
        if self.budget != options.budget_bytes:  # the disk has less
            why = f" of a disk with {self.free} bytes free, {options.reserve_bytes} of them kept (reserve_bytes)"
        return f"{self.used} of {self.budget} bytes are used ({part:.0f} %){why}{last}"


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else round(seconds, 1)


def _measure(data: str) -> tuple[int, int, float]:
    """Return the bytes below a folder, as they lie on the disk, what is free there, and the processor time it took."""
    began = time.thread_time()
    used, folders = 0, [data]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        stat = entry.stat(follow_symlinks=False)
                        used += stat.st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
        except FileNotFoundError:
            continue
    return used, shutil.disk_usage(data).free, time.thread_time() - began


def _drop_oldest(writer: Any, size: int) -> int:
    """Drop as many of the oldest segments of a message log as have so many bytes; return how many they were.

    The one being written is sealed first if it has to go as well.
    """
    if not isinstance(writer, MessageLog):
        return 0
    end = writer.next_position
    with open_log(writer.path) as log:
        files = log.stat()["files"]
    bounds = [int(one["first_seq"]) for one in files[1:]] + [end]
    below = 0
    for one, bound in zip(files, bounds, strict=False):
        if size <= 0 or one["first_seq"] >= end:
            break
        below, size = bound, size - int(one["bytes"])
    if below == end:
        writer.roll()
    return writer.drop_before(below) if below else 0


def _drop_in_closed(options: NodeChannelOptions, data: str, size: int) -> int:
    if disk_for(data).stat(options.path(data)) is None:
        return 0
    try:
        with open_channel_writer(options, data) as writer:
            return _drop_oldest(writer, size)
    except LockedError:
        return 0


Span = tuple[str, int, int]
"""A channel, how many records it has, and how many it may have."""
Margin = tuple[str, str, int, int | None]
"""A channel, a consumer, records behind, records until retention takes unread ones or None."""


def _spans_and_margins(config: NodeConfig) -> tuple[list[Span], list[Margin]]:
    """Return where the channels of the configuration are, and their consumers."""
    spans: list[Span] = []
    margins: list[Margin] = []
    for channel in config.channel:
        path = channel.path(config.data)
        if channel.format != "messagelog" or disk_for(path).stat(path) is None:
            continue
        try:
            with open_log(path) as log:
                first, end = log.first_position, log.next_position
            cursors = sidecar_of(disk_for(path), path).cursors()
        except (PenstockError, OSError):
            continue
        for fold in config.fold:
            if os.path.realpath(fold.log) == os.path.realpath(path):
                with contextlib.suppress(NotFoundError), STORES[fold.backend].open(fold.store, read_only=True) as store:
                    cursors[f"fold:{fold.name}"] = store.cursor().token.as_int() or 1
        for name, cursor in sorted(cursors.items()):
            margin = None if not channel.max_messages else cursor - (end - channel.max_messages)
            margins.append((channel.name, name, max(0, end - cursor), margin))
        if channel.max_messages:
            spans.append((channel.name, end - first, channel.max_messages))
    return spans, margins
