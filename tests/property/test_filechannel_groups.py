"""A group against a model of it: a list of messages, each with a state, and nothing else.

Several workers do anything in any order while time goes by and processes come and go.  After every step the model
knows what each worker may have been handed, and the group agrees.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.errors import LeaseLost
from penstock.log.filechannel import FileChannel, Group, Job
from penstock.testing.clock import FakeClock

LEASE, RETRY, MAX_TRIES = 30.0, 8.0, 3
WORKERS = ("ann", "bob", "eve")


@dataclass
class Message:
    """One message of the model."""

    position: int
    payload: bytes
    tries: int = 0
    worker: str = ""  # who has it
    until: float = 0.0
    not_before: float = 0.0
    finished: bool = False
    dead: bool = False
    jobs: list[Job] = field(default_factory=list)


class GroupMachine(RuleBasedStateMachine):
    """Everything that can be done to a group, beside its model."""

    ordered = False

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.clock = FakeClock()
        self.queue = FileChannel.open(self.folder + "/jobs", sync="none", compression="none", segment_bytes=200)
        self.groups: dict[str, Group] = {}
        self.model: list[Message] = []

    def group(self, worker: str) -> Group:
        if worker not in self.groups:
            key = (lambda payload: payload[:1]) if self.ordered else None
            self.groups[worker] = FileChannel.attach(self.queue.path).group(
                "workers", clock=self.clock, worker=worker, lease_seconds=LEASE, max_tries=MAX_TRIES, heartbeat=False,
                retry_seconds=RETRY, retry_seconds_max=RETRY, key=key,
            )  # fmt: skip
        return self.groups[worker]

    # --- The model

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def expire(self) -> None:
        """End the leases that are over, as the next one who takes does."""
        for message in self.model:
            if message.worker and message.until <= self.now:
                message.worker, message.not_before = "", 0.0
                if message.tries >= MAX_TRIES:
                    message.finished = message.dead = True

    def may_be_taken(self, limit: int) -> list[Message]:
        blocked: set[bytes] = set()
        found = []
        for message in self.model:
            if message.finished:
                continue
            key = message.payload[:1]
            free = not message.worker and message.not_before <= self.now and not (self.ordered and key in blocked)
            if free:
                found.append(message)
            blocked.add(key)
        again = [message for message in found if message.tries]  # those that were out before go first
        fresh = [message for message in found if not message.tries]
        return (found if self.ordered else again + fresh)[:limit]

    def newest(self, message: Message, job: Job) -> bool:
        return not message.finished and message.jobs[-1] is job

    # --- What can happen

    @rule(payloads=st.lists(st.sampled_from([b"a", b"b", b"cc", b"a2", b""]), min_size=1, max_size=5))
    def send(self, payloads: list[bytes]) -> None:
        positions = self.queue.append_many(payloads).tolist()
        self.model += [Message(position, payload) for position, payload in zip(positions, payloads, strict=True)]

    @rule(worker=st.sampled_from(WORKERS), limit=st.integers(1, 4))
    def take(self, worker: str, limit: int) -> None:
        self.expire()
        expected = self.may_be_taken(limit)
        jobs = self.group(worker).take_many(limit)
        if self.ordered:  # which of those that may be taken comes first is not promised between keys
            free = {message.position: message for message in self.may_be_taken(1000)}
            assert len(jobs) == len(expected)
            assert {job.position for job in jobs} <= free.keys()
            expected = [free[job.position] for job in jobs]
        for message, job in zip(expected, jobs, strict=True):
            message.tries += 1
            message.worker, message.until = worker, self.now + LEASE
            message.jobs.append(job)
            assert (job.position, job.payload, job.tries) == (message.position, message.payload, message.tries)

    @rule(data=st.data(), how=st.sampled_from(["ack", "fail", "fail now", "renew"]))
    def settle(self, data: st.DataObject, how: str) -> None:
        choices = [(message, job) for message in self.model for job in message.jobs if not job.settled]
        if not choices:
            return
        message, job = data.draw(st.sampled_from(choices))
        ours = self.newest(message, job)
        try:
            if how == "ack":
                job.ack()
            elif how == "renew":
                job.renew()
            else:
                job.fail(delay=None if how == "fail" else 0.0, reason="model")
        except LeaseLost:
            assert not ours or (how == "renew" and not message.worker)
            return
        assert ours
        if how == "ack":
            message.finished, message.worker = True, ""
        elif how == "renew":
            message.until = self.now + LEASE
        else:
            message.worker = ""
            message.not_before = self.now + (RETRY if how == "fail" else 0.0)
            message.finished = message.dead = message.tries >= MAX_TRIES

    @rule(seconds=st.sampled_from([1.0, RETRY, LEASE + 1]))
    def pass_time(self, seconds: float) -> None:
        self.clock.pass_(seconds)

    @rule(seconds=st.sampled_from([-1e6, 1e6]))
    def set_the_calendar(self, seconds: float) -> None:
        self.clock.jump(seconds)

    @rule(worker=st.sampled_from(WORKERS))
    def kill(self, worker: str) -> None:
        """Let a worker vanish without a word: its handle is simply not used any more."""
        gone = self.groups.pop(worker, None)
        if gone is not None:
            for message in self.model:
                for job in message.jobs:
                    if job._group is gone:
                        job.settled = True  # nobody can say anything about it any more

    @rule(worker=st.sampled_from(WORKERS))
    @precondition(lambda self: self.groups)
    def rewrite(self, worker: str) -> None:
        """Shorten the journal, as happens when it has grown long."""
        state = self.group(worker)._state
        core = state.run(lambda core: core)
        state._journal.rewrite(core.snapshot(state._log_id, state._disk.boot_id()))

    # --- What must hold

    @invariant()
    def the_floor_is_the_first_unfinished(self) -> None:
        if not getattr(self, "groups", None):
            return
        group = next(iter(self.groups.values()))
        stats = group.stats()
        open_ = [message for message in self.model if not message.finished]
        leased = [message for message in open_ if message.worker and message.until > self.now]
        assert stats.leased == len(leased)
        assert stats.waiting + stats.delayed == len(open_) - len(leased)
        assert stats.dead == sum(message.dead for message in self.model)
        assert stats.oldest_position == (open_[0].position if open_ else None)

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            for group in self.groups.values():
                group.close()
            self.queue.close()
            shutil.rmtree(self.folder)


class OrderedGroupMachine(GroupMachine):
    """The same with an order of keys: the first letter of a payload."""

    ordered = True


TestGroup = GroupMachine.TestCase
TestGroup.settings = settings(max_examples=25, stateful_step_count=30)
TestOrderedGroup = OrderedGroupMachine.TestCase
TestOrderedGroup.settings = settings(max_examples=25, stateful_step_count=30)
