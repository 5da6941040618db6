"""A group as one worker sees it: taking messages, and saying what became of them.

Every step is a turn (``state``) in which the group's core decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future

from penstock.clock import SYSTEM_CLOCK, Clock, shown_ns
from penstock.disk import ClosingHandle, Disk, FolderWait, LoopWait, disk_executor, in_disk_thread
from penstock.errors import ClosedError, LeaseLost, OptionsError, ReplacedError, Timeout
from penstock.log.filechannel.ends import QUEUE_LOOK_SECONDS, QueueEnd
from penstock.log.filechannel.group.choose import Chooser, Spent
from penstock.log.filechannel.group.core import GroupCore
from penstock.log.filechannel.group.dead import REDRIVEN, DeadLetter, bury, dead_letters, dead_path
from penstock.log.filechannel.group.heartbeat import Heartbeat
from penstock.log.filechannel.group.job import Job, Jobs, lost_message, reason_of
from penstock.log.filechannel.group.options import GroupOptions
from penstock.log.filechannel.group.state import GroupState
from penstock.log.filechannel.group.stats import GroupStats, count_unread, summarise
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.sidecar import Sidecar
from penstock.types import Problem

__all__ = ["Group"]


class Group(ClosingHandle):
    """One worker's part in a named group of a queue.  Safe to use from several threads.

    Any number of processes may have a group of the same name open: each message goes to one of them at a time, and
    again to another one until one of them has acknowledged it.

    >>> import tempfile
    >>> from penstock.log.filechannel import FileChannel
    >>> folder = tempfile.TemporaryDirectory()
    >>> with FileChannel.open(folder.name) as queue:
    ...     positions = queue.append_many([b"one", b"two"])
    ...     group = queue.group("resizers", lease_seconds=30, max_tries=5)
    ...     with group.take(timeout=1) as job:     # acknowledged when the block ends, failed when it raises
    ...         job.payload
    ...     group.stats().waiting
    b'one'
    1
    >>> folder.cleanup()
    """

    def __init__(
        self, end: QueueEnd, disk: Disk, sidecar: Sidecar, name: str, options: GroupOptions, *,
        send: Callable[[list[bytes]], None], durable: bool = False, clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.options, self.path = name, options, end.path
        self.worker = options.worker or f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(2)}"
        self._end, self._disk, self._clock, self._send = end, disk, clock, send
        self._chooser = Chooser(end, name, options, self._bury)
        self._jobs: weakref.WeakValueDictionary[int, Job] = weakref.WeakValueDictionary()
        self._waits = threading.local()  # each thread waits with a descriptor of its own, and keeps it
        self._waiting: LoopWait | None = None
        self._out: dict[int, int] = {}  # position by token, of all that was taken here and not settled yet
        self._heartbeat = Heartbeat(self._beat, options.lease_seconds / 3)
        ordered = None if options.any_order else options.key is not None
        self._state = GroupState(
            end, disk, sidecar, name, ordered=ordered, start=options.start, durable=durable, clock=clock
        )
        self._state.run(lambda _: None, create=True)

    @property
    def problems(self) -> list[Problem]:
        """The damage that was stepped over, with ``on_damage="skip"``, and messages that are gone."""
        return self._chooser.problems

    # --- Taking messages

    def take(self, timeout: float | None = None) -> Job:
        """Return the next message for this worker, waiting for it; Timeout when it takes longer."""
        jobs = self.take_many(1, timeout)
        if not jobs:
            raise Timeout(f"{self.path}: no message for group {self.name!r} within {timeout} s")
        return jobs[0]

    def take_many(self, limit: int = DEFAULT_LIMIT, timeout: float | None = 0.0) -> Jobs:
        """Return up to ``limit`` messages for this worker, waiting for the first; maybe none."""
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting: FolderWait | None = getattr(self._waits, "waiting", None)
        if waiting is None:
            waiting = self._waits.waiting = FolderWait(self._disk, self.path, look=QUEUE_LOOK_SECONDS)
        while True:
            jobs = self._try_take(limit)
            if jobs:
                return jobs
            waiting.reset()
            while not self._may_have_work():
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return jobs
                waiting.pause(self._at_most(remaining))
            if deadline is not None and time.monotonic() >= deadline:
                return self._try_take(limit)

    async def atake(self, timeout: float | None = None) -> Job:
        """Return the next message for this worker without blocking the event loop."""
        jobs = await self.atake_many(1, timeout)
        if not jobs:
            raise Timeout(f"{self.path}: no message for group {self.name!r} within {timeout} s")
        return jobs[0]

    async def atake_many(self, limit: int = DEFAULT_LIMIT, timeout: float | None = 0.0) -> Jobs:
        """Return up to ``limit`` messages without blocking the event loop; who is cancelled gives back what it got."""
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting = self._waiting = self._waiting or LoopWait(self._disk, self.path)
        while True:
            taking = disk_executor().submit(self._try_take, limit)
            try:
                jobs = await asyncio.shield(asyncio.wrap_future(taking))
            except asyncio.CancelledError:
                taking.add_done_callback(self._give_back)
                raise
            if jobs:
                return jobs
            waiting.reset()
            while not await in_disk_thread(self._may_have_work):
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return jobs
                await waiting.pause(self._at_most(remaining))

    def __iter__(self) -> Iterator[Job]:
        """Yield messages and wait for more, until the queue is closed; ``ack`` each after the work."""
        with self._until_closed():
            while True:
                yield self.take()

    async def __aiter__(self) -> AsyncIterator[Job]:
        """Yield messages and wait for more without blocking the event loop, until the queue is closed."""
        with self._until_closed():
            while True:
                yield await self.atake()

    # --- What became of them

    def ack(self, jobs: Sequence[Job]) -> None:
        """Finish messages, all in one turn; LeaseLost if some were given to others, after the rest was finished."""
        self._settle(jobs, lambda core, tokens: core.finish(tokens))

    def fail(self, jobs: Sequence[Job], delay: float | None = None, reason: str = "") -> None:
        """Let messages come again, all in one turn; those that failed ``max_tries`` times go to the dead letters."""
        if delay is not None and not 0 <= delay < math.inf:
            raise OptionsError(f"delay={delay}: must not be negative, and a number of seconds")
        jobs = [job for job in jobs if not job.settled]

        def decide(core: GroupCore, _: dict[int, int]) -> list[int]:
            now, now_ns, lost = self._clock.monotonic(), shown_ns(self._clock), []
            spent = [job for job in jobs if self.options.is_spent(job.tries) and _holds(core, job)]
            self._bury([(job.position, job.tries, job.payload, reason) for job in spent])
            core.bury([job.position for job in spent])
            buried = {job.position for job in spent}
            for job in jobs:
                if job.position not in buried:
                    wait = self.options.delay_after(job.tries) if delay is None else delay
                    lost += core.fail({job.position: job.token}, now, now_ns, wait, reason)
            return lost

        self._settle(jobs, decide)

    def renew(self, jobs: Sequence[Job]) -> None:
        """Let leases begin anew; LeaseLost if some have ended."""
        tokens = {job.position: job.token for job in jobs if not job.settled}
        lost = self._state.run(lambda core: core.renew(tokens, self._clock.monotonic(), self.options.lease_seconds))
        self._mark_lost(jobs, lost)
        if lost:
            raise lost_message(self.path, self.name, lost)

    def leave(self, jobs: Sequence[Job], exc: BaseException | None) -> None:
        """End a ``with`` block: acknowledge what is left, or fail it when the block raised."""
        left = [job for job in jobs if not job.settled]
        if exc is None:
            self.ack(left)
        elif isinstance(exc, Exception):
            with contextlib.suppress(ClosedError):
                self._settle_quietly(left, reason_of(exc))
        else:  # KeyboardInterrupt, a cancelled task: nobody's failure
            with contextlib.suppress(ClosedError):
                self.give_back(left)

    def give_back(self, jobs: Sequence[Job]) -> None:
        """Let others have messages at once, as if their leases had ended."""
        self._release({job.token: job.position for job in jobs if not job.settled})
        self._mark_settled(jobs)

    def _release(self, out: dict[int, int]) -> None:
        def decide(core: GroupCore) -> None:
            held = [position for token, position in out.items() if _leased(core, position, token)]
            core.release(held, "given back")

        if out:
            self._state.run(decide)

    def _settle(self, jobs: Sequence[Job], decide: Callable[[GroupCore, dict[int, int]], list[int]]) -> None:
        tokens = {job.position: job.token for job in jobs if not job.settled}
        if not tokens:
            return
        lost = self._state.run(lambda core: decide(core, tokens))
        self._mark_settled(jobs)
        self._mark_lost(jobs, lost)
        if lost:
            raise lost_message(self.path, self.name, lost)

    def _settle_quietly(self, jobs: Sequence[Job], reason: str) -> None:
        with contextlib.suppress(LeaseLost):  # it is another one's by now, and what the block raised matters more
            self.fail(jobs, reason=reason)

    def _mark_settled(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.settled = True
            self._out.pop(job.token, None)

    @staticmethod
    def _mark_lost(jobs: Sequence[Job], lost: Sequence[int]) -> None:
        gone = set(lost)
        for job in jobs:
            if job.position in gone:
                job.lost = True

    def in_work(self, positions: Sequence[int]) -> Jobs:
        """Return messages that are in work, whoever took them: to settle what another process has done.

        OptionsError when one of them is not.  Their leases are not renewed from here.
        """

        def find(core: GroupCore) -> Jobs:
            jobs = []
            for position in positions:
                entry = core.entries.get(position)
                if entry is None or not entry.leased:
                    raise OptionsError(f"{self.path}: nobody of group {self.name!r} works on position {position}")
                payload = self._chooser.read_again(core, position) or b""
                jobs.append(Job(self, payload, position, entry.tries, entry.token, self._clock.monotonic()))
            return Jobs(self, jobs)

        return self._state.run(find)

    # --- Dead letters

    @property
    def dead_path(self) -> str:
        """Where the dead letters of this group are."""
        return dead_path(self.path, self.name)

    def dead(self) -> list[DeadLetter]:
        """Return the dead letters that were not sent again."""
        return [letter for _, letter in dead_letters(self._disk, self.dead_path)]

    def redrive(self, limit: int | None = None) -> int:
        """Send dead letters to their queue again, oldest first; return how many.

        They get a new position at its end, and every group and receiver of the queue sees them.  When this process dies
        in the middle, some may be sent twice, none is lost.
        """
        from penstock.log.filechannel.channel import FileChannel

        done = 0
        if self._disk.stat(self.dead_path) is None:
            return done
        with FileChannel.attach(self.dead_path, disk=self._disk) as view, view.ack_rx(REDRIVEN) as rx:
            while limit is None or done < limit:
                batch = rx.recv_many(256 if limit is None else min(256, limit - done))
                if not len(batch):
                    break
                self._send([DeadLetter.decode(record).payload for record in batch.to_payloads()])
                rx.ack()
                done += len(batch)
        return done

    def _bury(self, spent: Sequence[Spent]) -> None:
        if not spent:
            return
        now_ns = shown_ns(self._clock)
        bury(self._disk, self.dead_path, [
            DeadLetter(payload, position, tries, reason, now_ns, self.name)
            for position, tries, payload, reason in spent
        ])  # fmt: skip

    # --- Where it stands

    def stats(self) -> GroupStats:
        """Return what waits, what is in work and with whom; this reads what nobody has read yet, to count it."""
        core = self._state.run(lambda core: core)
        with self._state.mutex:
            unread = count_unread(self._end.folder, core.next, self._end.visible)
            dead = len(self.dead())
            return summarise(core, self.name, unread, dead, self._clock.monotonic(), shown_ns(self._clock))

    # --- Open and closed

    def close(self, *, give_back: bool = True) -> None:
        """Take no more.  What is still in work goes to others at once, or when its lease ends without ``give_back``."""
        if self._state.closed:
            return
        self._heartbeat.close()
        with contextlib.suppress(ReplacedError, OSError, Timeout):
            if give_back:
                self._release(dict(self._out))
            self._state.keep_seen()
        self._state.close("this part in the group is closed")
        self._chooser.close()
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.close()

    @property
    def closed(self) -> str:
        """Why it takes no more, or nothing."""
        return self._state.closed

    def forked(self) -> None:
        """Close in the child of a fork; the leases stay the parent's."""
        if hasattr(self, "_state"):
            self._state.forked("the group was opened before a fork: open its own queue in the child")

    def __repr__(self) -> str:
        return f"<Group {self.name!r} of {self.path} {self.closed or f'as {self.worker}'}>"

    # --- One turn

    def _try_take(self, limit: int) -> Jobs:
        if limit < 1:
            raise OptionsError(f"limit={limit}: must be at least 1")
        if self.options.any_order:
            raise OptionsError(f"{self.path}: any_order=True is for those who take no messages")
        if self._end.closed:
            raise ClosedError(f"{self.path}: {self._end.closed}")
        jobs: Jobs = self._state.run(lambda core: self._decide(core, limit))
        if jobs and self.options.heartbeat:
            self._heartbeat.wake()
        return jobs

    def _decide(self, core: GroupCore, limit: int) -> Jobs:
        now = self._clock.monotonic()
        if self._state.was_cut:
            self._chooser.forget()
            self._state.was_cut = False
        payloads, after = self._chooser.choose(core, limit, now)
        if not payloads:
            core.see([], [], after)
            return Jobs(self, ())
        taken = core.take(list(payloads), after, self.worker, now, shown_ns(self._clock), self.options.lease_seconds)
        jobs = Jobs(self, (
            Job(self, payloads[entry.position], entry.position, entry.tries, entry.token, now) for entry in taken
        ))  # fmt: skip
        for job in jobs:
            self._jobs[job.token] = job
            self._out[job.token] = job.position
        return jobs

    # --- Waiting, and the heartbeat

    def _may_have_work(self) -> bool:
        """Whether a turn may bring something: cheap, and without the lock."""
        with self._state.mutex:
            core = self._state.core
            if self._end.closed or self._state.closed or core is None or self._state.changed():
                return True
            return core.due(self._clock.monotonic()) == 0.0 or self._chooser.has_unread(core)

    def _at_most(self, remaining: float | None) -> float | None:
        """Return for how long to wait at most: until then something may be due by itself."""
        with self._state.mutex:
            core = self._state.core
            due = None if core is None else core.due(self._clock.monotonic())
        return remaining if due is None else due if remaining is None else min(due, remaining)

    def _beat(self) -> bool:
        """Renew the leases of everything in work; whether there is any."""
        bound, now = self.options.work_seconds, self._clock.monotonic()
        known = [job for ref in self._jobs.valuerefs() if (job := ref()) is not None]  # a list made in one step
        jobs = [job for job in known if not job.settled and not job.lost]
        jobs = [job for job in jobs if not bound or now - job.taken_at < bound]
        if jobs:
            tokens = {job.position: job.token for job in jobs}
            lost = self._state.run(lambda core: core.renew(tokens, self._clock.monotonic(), self.options.lease_seconds))
            self._mark_lost([job for job in jobs if not job.settled], lost)
        return bool(jobs)

    def _give_back(self, taking: Future[Jobs]) -> None:
        """Let others have what was taken for someone who was cancelled meanwhile."""
        if taking.cancelled() or taking.exception() is not None:
            return
        jobs = taking.result()
        if jobs:
            disk_executor().submit(self.give_back, jobs)

    @contextlib.contextmanager
    def _until_closed(self) -> Iterator[None]:
        try:
            yield
        except ClosedError:
            if not self._end.closed:
                raise


def _holds(core: GroupCore, job: Job) -> bool:
    entry = core.entries.get(job.position)
    return entry is not None and entry.token == job.token


def _leased(core: GroupCore, position: int, token: int) -> bool:
    entry = core.entries.get(position)
    return entry is not None and entry.token == token and entry.leased
