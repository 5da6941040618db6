"""All channels of a data directory in one process: members, rules, history and queues that survive.

No server is needed: ``ChannelManager.open`` gives Python users the whole thing, and the channel server is one more
user of it.  Everything here runs on one event loop; whatever waits for the disk runs in one bounded executor, channel
by channel in order, different channels side by side.  Small messages are the exception: see actor.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self

from penstock.channels import commands as c, rules
from penstock.channels.actor import Actor, CloseLog
from penstock.channels.channel import Channel
from penstock.channels.core import ShardCore, shard_of
from penstock.channels.counts import ACTIVE, FAILURES, count_command
from penstock.channels.files import ChannelFiles
from penstock.channels.ids import ChannelId, Nid, is_handler
from penstock.channels.live import Memberships
from penstock.channels.model import PersistedChannel
from penstock.channels.options import ManagerOptions
from penstock.channels.patience import Patience
from penstock.channels.saver import Saver
from penstock.channels.session import ChannelSession, Listener, WhenFull
from penstock.channels.store import ChannelStore, FileChannelStore, channel_hash, load_many
from penstock.disk import Disk, Handle, Lock, disk_executor, disk_for, in_disk_thread
from penstock.disk.doors import refuse_foreign
from penstock.errors import ClosedError, CorruptionError, OptionsError, PenstockError
from penstock.log.messagelog import MessageLogOptions
from penstock.options import options_from, shows_options

__all__ = ["ChannelManager"]

_log = logging.getLogger(__name__)

LOCK = "penstock-channels-lock"
SAVING_THREADS = 1
"""How many threads share the saves that wait together: one, which does them side by side below Python."""


class ChannelManager(Handle):
    """The channels of one data directory.

    >>> import tempfile
    >>> async def demo(folder):
    ...     async with await ChannelManager.open(folder) as manager:
    ...         ops = manager.channel("ops/east")
    ...         await ops.join("ann@localhost")
    ...         await ops.configure("ann@localhost", persist=True)
    ...         await ops.broadcast("ann@localhost", b"pump 7 is on")
    ...     async with await ChannelManager.open(folder) as manager:
    ...         ops = manager.channel("ops/east")
    ...         return [entry.payload for entry in await ops.history("ann@localhost")]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(demo(folder))
    [b'pump 7 is on']
    """

    def __init__(self, data_dir: str, store: ChannelStore, disk: Disk, options: ManagerOptions, lock: Lock) -> None:
        super().__init__()
        self.data_dir, self.options = data_dir, options
        self._store, self._disk, self._lock = store, disk, lock
        self._memberships = Memberships()
        self._cores = [
            ShardCore(
                options.domain,
                options.limits,
                self._memberships,
                authenticated=options.authenticated,
                flush_floor=options.flush_floor,
            )
            for _ in range(options.shards)
        ]
        self._actors: dict[str, Actor] = {}
        self._open_logs: dict[Actor, None] = {}  # in order of use
        self._closing: set[asyncio.Task[Any]] = set()
        self._working: set[Future[Any]] = set()
        self._sessions: dict[
            Nid, tuple[ChannelSession, ...]
        ] = {}  # replaced, not changed: a sink may close its session
        self._listeners: tuple[Listener, ...] = ()
        self.event_gate: Callable[[c.Event], Awaitable[None]] | None = None
        """Told of every event before members are, who moderates the channels: raising withholds the event."""
        self._log_options = MessageLogOptions(
            sync="none", max_payload_bytes=options.limits.max_payload_size, segment_bytes=options.segment_bytes
        )
        self.saver = Saver(store, disk_executor(), SAVING_THREADS)
        self._closed = ""
        self.patience = Patience(options.sync_on_loop_seconds)
        self.busy = 0
        """How many channels have something under way."""
        self._active = 0
        self.broken: dict[str, str] = {}
        """Folders that hold a channel that cannot be restored, and why: they are left alone.  Also those of channels
        that are served although parts of their log are damaged, from when that is found: their history has holes."""

    @classmethod
    @shows_options(ManagerOptions)
    async def open(
        cls,
        data_dir: str | os.PathLike[str],
        options: ManagerOptions | None = None,
        *,
        store: ChannelStore | None = None,
        disk: Disk | None = None,
        **given: Any,
    ) -> ChannelManager:
        """Open a data directory, created if it is not there, and restore its channels.

        Options as keywords or as one object; ManagerOptions says what each means.  LockedError if another manager has
        the directory open.
        """
        disk, options = disk or disk_for(data_dir), options_from(ManagerOptions, options, given)
        root = os.fspath(data_dir).rstrip("/") or "/"
        files = FileChannelStore(root, disk)
        lock = await in_disk_thread(_prepare, disk, files, root)
        manager = cls(root, store or files, disk, options, lock)
        try:
            if options.authenticated:
                await manager._restore()
        except BaseException:
            await manager.close()
            raise
        return manager

    # --- Channels

    def channel(self, name: str | ChannelId) -> Channel:
        """Return a channel by its handler (or ``!handler@domain``); it need not exist yet."""
        if isinstance(name, str):
            if name.startswith("!"):
                name = ChannelId.parse(name)
            elif is_handler(name):
                name = ChannelId(name, self.options.domain)
            else:
                raise OptionsError(f"invalid channel handler: {name[:80]!r}")
        return Channel(self, name)

    def channels(
        self, nid: str | Nid, *, owner: bool = False, page: int | None = None, page_size: int | None = None
    ) -> c.Page:
        """Return the ids of the channels ``nid`` is in (or owns), a page at a time as the protocol does."""
        who = as_nid(nid)
        handlers = [h for h in self._memberships.of(who) if not owner or self._core(h).channels[h].owner == who]
        names = sorted(str(ChannelId(handler, self.options.domain)) for handler in handlers)
        return rules.paged(names, page, page_size, 20, 50)

    def handlers(self) -> list[str]:
        """Return the handlers of all channels, sorted."""
        return sorted(handler for core in self._cores for handler in core.channels)

    async def submit(self, command: c.Command, source: ChannelSession | None = None) -> Any:
        """Do what a command says and return its answer; Refused if the rules say no.

        An error other than Refused means that nothing was changed in memory, and on disk nothing that counts.
        """
        answer = self.ask(command, source)
        return await answer if isinstance(answer, asyncio.Future) else answer

    def ask(self, command: c.Command, source: ChannelSession | None = None) -> Any:
        """Begin what a command says: return its answer, or a future of it when the disk has to be waited for.

        Commands of one channel take effect in the order they were asked.
        """
        self._check_open()
        handler = command.channel.handler
        actor = self._actors.get(handler)
        if actor is None:
            self._check_broken(command)
            files = ChannelFiles(handler, self._store, self._disk, self.data_dir, self._log_options)
            actor = self._actors[handler] = Actor(self, self._core(handler), files)
        try:
            answer = actor.ask(command, source)
        except Exception as exc:
            count_command(command, exc)
            raise
        finally:
            if actor.idle:  # answered from memory, so the actor's own task did not say so
                self.drained(actor)
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(partial(_count, command))
        else:
            count_command(command, None)
        return answer

    async def discard(self, handler: str) -> None:
        """Delete what is left of a channel that could not be restored, its history included."""
        self._check_open()
        digest = channel_hash(handler)
        if digest not in self.broken or handler in self._core(handler).channels:
            raise OptionsError(f"channel {handler!r} is not broken, or is served: delete it as its owner")
        await self.in_thread(self._store.delete, digest)
        del self.broken[digest]

    # --- Those who listen

    def connect(
        self,
        nid: str | Nid,
        *,
        sink: Listener | None = None,
        inbox_size: int = 2048,
        when_full: WhenFull = "end",
    ) -> ChannelSession:
        """Let ``nid`` hear what its channels say, until the session is closed.

        Events and runs of messages go to ``sink``, or wait in the session to be iterated over: at the most
        ``inbox_size`` of them.  One more ends the session with Backpressure, or is dropped and counted when
        ``when_full`` is ``"drop"``.  A sink that raises ends its session and disturbs nobody else.
        """
        self._check_open()
        session = ChannelSession(self, as_nid(nid), sink, inbox_size, when_full)
        self._sessions[session.nid] = (*self._sessions.get(session.nid, ()), session)
        return session

    def is_connected(self, nid: str | Nid) -> bool:
        """Say whether ``nid`` has a session."""
        return as_nid(nid) in self._sessions

    def listen(self, listener: Listener) -> None:
        """Have ``listener`` called with every event and every run of messages of every channel.

        One that raises is logged and counted, and called again the next time.
        """
        self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: Listener) -> None:
        """Stop calling ``listener``; OptionsError if it does not listen."""
        if listener not in self._listeners:
            raise OptionsError("unlisten: that listener does not listen")
        at = self._listeners.index(listener)
        self._listeners = self._listeners[:at] + self._listeners[at + 1 :]

    async def disconnected(self, session: ChannelSession) -> None:
        """Forget a session; with the last one of a member its transient channels are left."""
        sessions = self._sessions.get(session.nid, ())
        if session not in sessions:
            return
        left = tuple(other for other in sessions if other is not session)
        if left:
            self._sessions[session.nid] = left
            return
        del self._sessions[session.nid]
        # All are asked at once, so that each channel is left before anything that is asked of it from now on: whoever
        # comes back meanwhile joins anew.
        leaving: dict[str, Any] = {}
        for handler in self._memberships.of(session.nid):
            channel = self._core(handler).channels.get(handler)
            if channel is None or (channel.config.persist and self.options.authenticated):
                continue
            try:
                leaving[handler] = self.ask(c.Leave(ChannelId(handler, self.options.domain), session.nid))
            except (PenstockError, OSError) as exc:
                _log.warning("%s stays in channel %s: %s", session.nid, handler, exc)
        for handler, answer in leaving.items():
            try:
                if isinstance(answer, asyncio.Future):
                    await answer
            except (PenstockError, OSError) as exc:
                _log.warning("%s stays in channel %s: %s", session.nid, handler, exc)

    def deliver(self, events: Iterable[c.Delivery], source: object) -> None:
        """Hand events and runs to those they are for, except to the session that caused them.  Never raises."""
        if not self._sessions and not self._listeners:
            return
        for event in events:
            for listener in self._listeners:
                try:
                    listener(event)
                except (Exception, asyncio.CancelledError) as exc:  # noqa: BLE001 - it is nobody else's
                    FAILURES.add(who="listener")
                    _log.warning("a listener of channels failed: %r", exc)
            if self._sessions:
                for nid in event.recipients:
                    for session in self._sessions.get(nid, ()):
                        if session is not source:
                            session.put(event)

    # --- For the actors

    async def in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run something that touches the disk."""
        future = disk_executor().submit(work, *args)
        self._working.add(future)
        future.add_done_callback(self._working.discard)
        return await asyncio.wrap_future(future)

    def log_opened(self, actor: Actor) -> None:
        """Note that a log is open."""
        self._open_logs[actor] = None

    def note_damage(self, actor: Actor) -> None:
        """Remember what is wrong with the log of a channel that is served all the same."""
        if actor.files.damage:
            self.broken[actor.files.hash] = "; ".join(actor.files.damage)

    def drained(self, actor: Actor) -> None:
        """Note that an actor has nothing to do; forget it if its channel is gone."""
        if actor in self._open_logs and (actor is not next(reversed(self._open_logs)) or not actor.files.is_open):
            del self._open_logs[actor]
            if actor.files.is_open:
                self._open_logs[actor] = None  # now the one used last
        if actor.channel() is None and self._actors.get(actor.files.handler) is actor:
            del self._actors[actor.files.handler]
        self._count_channels()
        if len(self._open_logs) > self.options.max_open_logs and not self._closed:
            self._close_oldest()

    def _close_oldest(self) -> None:
        """Close the logs used longest ago, as far as nobody is using them now."""
        idle = [actor for actor in self._open_logs if actor.idle]
        for actor in idle[: len(self._open_logs) - self.options.max_open_logs]:
            del self._open_logs[actor]
            task = asyncio.get_running_loop().create_task(actor.submit(CloseLog(ChannelId("", ""), Nid("", ""))))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    # --- Open and closed

    async def close(self) -> None:
        """Finish what was asked, flush every log and let go of the directory."""
        if self._closed:
            return
        self._closed = "the manager is closed"
        await asyncio.gather(*self._closing, return_exceptions=True)
        for actor in list(self._actors.values()):
            await actor.settle()
        closing = [self.in_thread(actor.files.close) for actor in self._actors.values() if actor.files.is_open]
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(error, BaseException):
                _log.warning("%s: a last flush failed: %s", self.data_dir, error)
        for sessions in list(self._sessions.values()):
            for session in sessions:
                session.end()
        # What a cancelled caller has left running still touches the folder.
        await asyncio.gather(*map(asyncio.wrap_future, list(self._working)), return_exceptions=True)
        self._count_channels()
        self._lock.release()

    def forked(self) -> None:
        """Close in the child of a fork; the data directory stays the parent's."""
        self._closed = "the manager was opened before a fork: open another data directory in the child"
        self._lock.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    # --- Restoring

    async def _restore(self) -> None:
        parts: list[list[str]] = [[] for _ in self._cores]
        for digest in await self.in_thread(self._store.hashes):
            parts[shard_of(digest, len(parts)) if _is_hash(digest) else 0].append(digest)
        loaded = await asyncio.gather(*(self.in_thread(self._load, part) for part in parts))
        for core, channels in zip(self._cores, loaded, strict=True):
            for saved in channels:
                core.restore(saved)
        self._count_channels()

    def _load(self, digests: list[str]) -> list[PersistedChannel]:
        """Load the channels of one shard; one that cannot be read is passed over, and remembered."""
        channels = []
        for digest, found in zip(digests, load_many(self._store, digests), strict=True):
            if isinstance(found, PersistedChannel) and channel_hash(found.handler) != digest:
                reason = f"the folder is not that of {found.handler!r}"
                found = CorruptionError(f"{self.data_dir}/{digest}", 0, reason)
            if isinstance(found, PersistedChannel):
                channels.append(found)
            else:
                _log.warning("a channel is passed over: %s", found)
                self.broken[digest] = str(found)
        return channels

    # --- Small things

    def _count_channels(self) -> None:
        alive = 0 if self._closed else self._memberships.channels
        if alive != self._active:
            ACTIVE.add(alive - self._active)  # other managers of this process count theirs
            self._active = alive

    def _core(self, handler: str) -> ShardCore:
        return self._cores[shard_of(channel_hash(handler), len(self._cores))]

    def _check_broken(self, command: c.Command) -> None:
        """Refuse a second life over the folder of a channel that could not be restored."""
        handler = command.channel.handler
        if self.broken and isinstance(command, c.Join) and handler not in self._core(handler).channels:
            digest = channel_hash(handler)
            if digest in self.broken:
                raise CorruptionError(f"{self.data_dir}/{digest}", 0, self.broken[digest])

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.data_dir}: {self._closed}")


def as_nid(nid: str | Nid) -> Nid:
    """Return a member's name, parsed if need be.

    >>> as_nid("ann@localhost").username
    'ann'
    """
    return Nid.parse(nid) if isinstance(nid, str) else nid


def _count(command: c.Command, future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        error = future.exception()
        count_command(command, error if isinstance(error, Exception) else None)


def _prepare(disk: Disk, files: FileChannelStore, root: str) -> Lock:
    refuse_foreign(disk, root, "data directory of channels")
    if disk.stat(root) is None:
        files.make_root()
    return disk.lock(f"{root}/{LOCK}", of=root)


def _is_hash(name: str) -> bool:
    return len(name) == 64 and all(digit in "0123456789abcdef" for digit in name)
