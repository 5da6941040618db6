"""All channels of a data directory in one process: members, rules, history and queues that survive.

No server is needed: ``ChannelManager.open`` gives Python users the whole thing, and the channel server is one more
user of it.  Everything here runs on one event loop; whatever waits for the disk runs in one bounded executor, channel
by channel in order, different channels side by side.  Small messages are the exception: see actor.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from penstock.channels import commands as c
from penstock.channels import rules
from penstock.channels.actor import Actor, CloseLog
from penstock.channels.channel import Channel
from penstock.channels.core import Core, shard_of
from penstock.channels.counts import ACTIVE, count_command
from penstock.channels.files import ChannelFiles
from penstock.channels.ids import ChannelId, Nid, is_handler
from penstock.channels.live import Memberships
from penstock.channels.model import PersistedChannel
from penstock.channels.options import ManagerOptions
from penstock.channels.patience import Patience
from penstock.channels.saver import Saver
from penstock.channels.session import Session
from penstock.channels.store import ChannelStore, FileChannelStore, channel_hash, load_many
from penstock.disk import Disk, Handle, Lock, PosixDisk
from penstock.errors import ClosedError, CorruptionError, OptionsError, PenstockError
from penstock.log.messagelog import MessageLogOptions

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
            Core(options.domain, options.limits, self._memberships, authenticated=options.authenticated)
            for _ in range(options.shards)
        ]
        self._actors: dict[str, Actor] = {}
        self._open_logs: dict[Actor, None] = {}  # in order of use
        self._closing: set[asyncio.Task[Any]] = set()
        self._sessions: dict[Nid, list[Session]] = {}
        self._listeners: list[Callable[[c.Event | c.Message], None]] = []
        self._log_options = MessageLogOptions(
            sync="none", max_payload_bytes=options.limits.max_payload_size, segment_bytes=options.segment_bytes
        )
        self._executor = ThreadPoolExecutor(options.io_threads, "penstock-channels")
        self.saver = Saver(store, self._executor, min(options.io_threads, SAVING_THREADS))
        self._closed = ""
        self.patience = Patience(options.sync_on_loop_seconds)
        self.busy = 0
        """How many channels have something under way."""
        self._active = 0
        self.broken: dict[str, str] = {}
        """Folders that hold a channel that cannot be restored, and why.  They are left alone."""

    @classmethod
    async def open(
        cls,
        data_dir: str | os.PathLike[str],
        options: ManagerOptions | None = None,
        *,
        store: ChannelStore | None = None,
        disk: Disk | None = None,
    ) -> ChannelManager:
        """Open a data directory, created if it is not there, and restore its channels.

        LockedError if another manager has it open.
        """
        disk, options = disk or PosixDisk(), options or ManagerOptions()
        root = os.fspath(data_dir).rstrip("/") or "/"
        files = FileChannelStore(root, disk)
        lock = await asyncio.to_thread(_prepare, disk, files, root)
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

    async def submit(self, command: c.Command, source: Session | None = None) -> Any:
        """Do what a command says and return its answer; Refused if the rules say no.

        An error other than Refused means that nothing was changed in memory, and on disk nothing that counts.
        """
        self._check_open()
        handler = command.channel.handler
        actor = self._actors.get(handler)
        if actor is None:
            self._check_broken(command)
            files = ChannelFiles(handler, self._store, self._disk, self.data_dir, self._log_options)
            actor = self._actors[handler] = Actor(self, self._core(handler), files)
        try:
            answer = await actor.submit(command, source)
        except Exception as exc:
            count_command(command, exc)
            raise
        finally:
            if actor.idle:  # answered from memory, so the actor's own task did not say so
                self.drained(actor)
        count_command(command, None)
        return answer

    async def discard(self, handler: str) -> None:
        """Delete what is left of a channel that could not be restored, its history included."""
        self._check_open()
        digest = channel_hash(handler)
        if digest not in self.broken:
            raise OptionsError(f"channel {handler!r} is not broken")
        await self.in_thread(self._store.delete, digest)
        del self.broken[digest]

    # --- Those who listen

    def connect(
        self,
        nid: str | Nid,
        *,
        sink: Callable[[c.Event | c.Message], None] | None = None,
        inbox_size: int = 2048,
    ) -> Session:
        """Let ``nid`` hear what its channels say, until the session is closed.

        Events and messages go to ``sink``, or wait in the session to be iterated over.
        """
        self._check_open()
        session = Session(self, as_nid(nid), sink, inbox_size)
        self._sessions.setdefault(session.nid, []).append(session)
        return session

    def is_connected(self, nid: str | Nid) -> bool:
        """Say whether ``nid`` has a session."""
        return as_nid(nid) in self._sessions

    def listen(self, listener: Callable[[c.Event | c.Message], None]) -> None:
        """Have ``listener`` called with every event and message of every channel."""
        self._listeners.append(listener)

    async def disconnected(self, session: Session) -> None:
        """Forget a session; with the last one of a member its transient channels are left."""
        sessions = self._sessions.get(session.nid, [])
        if session not in sessions:
            return
        sessions.remove(session)
        if sessions:
            return
        del self._sessions[session.nid]
        for handler in self._memberships.of(session.nid):
            channel = self._core(handler).channels.get(handler)
            if channel is None or (channel.config.persist and self.options.authenticated):
                continue
            try:
                await self.submit(c.Leave(ChannelId(handler, self.options.domain), session.nid))
            except (PenstockError, OSError) as exc:
                _log.warning("%s stays in channel %s: %s", session.nid, handler, exc)

    def deliver(self, events: Iterable[c.Event | c.Message], source: object) -> None:
        """Hand events to those they are for, except to the session that caused them."""
        if not self._sessions and not self._listeners:
            return
        for event in events:
            for listener in self._listeners:
                listener(event)
            if self._sessions:
                for nid in event.recipients:
                    for session in self._sessions.get(nid, ()):
                        if session is not source:
                            session.put(event)

    # --- For the actors

    async def in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run something that touches the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def log_opened(self, actor: Actor) -> None:
        """Note that a log is open."""
        self._open_logs[actor] = None

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
        self._executor.shutdown()
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

    def _core(self, handler: str) -> Core:
        return self._cores[shard_of(channel_hash(handler), len(self._cores))]

    def _check_broken(self, command: c.Command) -> None:
        """Refuse a second life over the folder of a channel that could not be restored."""
        if self.broken and isinstance(command, c.Join):
            digest = channel_hash(command.channel.handler)
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


def _prepare(disk: Disk, files: FileChannelStore, root: str) -> Lock:
    if disk.stat(root) is None:
        files.make_root()
    return disk.lock(f"{root}/{LOCK}")


def _is_hash(name: str) -> bool:
    return len(name) == 64 and all(digit in "0123456789abcdef" for digit in name)
