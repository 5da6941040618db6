"""A named receiver against a list and two numbers: what was handed out, and what of it was acknowledged."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from penstock.disk import MemoryDisk
from penstock.log.filechannel import ChannelOptions, FileChannel


class Acks(RuleBasedStateMachine):
    """One channel, one receiver named "worker", and what both should be."""

    @initialize(
        segment_bytes=st.sampled_from([30, 200, 1 << 20]),
        compression=st.sampled_from(["none", "snappy"]),
        most=st.integers(1, 3),
    )
    def begin(self, segment_bytes: int, compression: str, most: int) -> None:
        self.most = most
        self.options = ChannelOptions(
            sync="none",
            segment_bytes=segment_bytes,
            compression=compression,  # type: ignore[arg-type]
            collect=False,
        )
        self.disk = MemoryDisk()
        self.sent: list[bytes] = []
        self.positions: list[int] = []
        self.tries: list[int] = []
        self.dead: list[bytes] = []
        self.handed = self.acked = 0
        self.open()

    def open(self) -> None:
        self.channel = FileChannel.open("c", self.options, disk=self.disk)
        self.rx = self.channel.ack_rx("worker", max_tries=self.most)
        self.tries = [0] * len(self.sent)

    def teardown(self) -> None:
        if hasattr(self, "channel"):
            self.channel.close()
            if self.dead:
                with FileChannel.open("c-dead", self.options, disk=self.disk) as letters:
                    assert [p for b in letters.rx().batches(timeout=0) for p in b.to_payloads()] == self.dead

    def at(self, index: int) -> int:
        return self.positions[index] if index < len(self.positions) else self.channel.stats().write_position

    @rule(count=st.integers(1, 40), together=st.booleans())
    def send(self, count: int, together: bool) -> None:
        more = [b"message %d" % (len(self.sent) + n) for n in range(count)]
        if together:
            self.positions += self.channel.append_many(more).tolist()
        else:
            self.positions += [self.channel.append(payload) for payload in more]
        self.sent += more
        self.tries += [0] * count

    @rule()
    def receive_one(self) -> None:
        expected = self.sent[self.handed] if self.handed < len(self.sent) else None
        assert self.rx.peek() == expected
        assert self.rx.try_recv() == expected
        self.handed += expected is not None

    @rule(limit=st.integers(1, 60))
    def receive_many(self, limit: int) -> None:
        batch = self.rx.recv_many(limit)
        assert batch.to_payloads() == self.sent[self.handed : self.handed + len(batch)]
        assert batch.positions.tolist() == self.positions[self.handed : self.handed + len(batch)]
        assert len(batch) or self.handed == len(self.sent)
        self.handed += len(batch)

    @rule(count=st.one_of(st.none(), st.integers(0, 60)))
    def acknowledge(self, count: int | None) -> None:
        count = None if count is None else min(count, self.handed - self.acked)
        self.rx.ack(count)
        self.acked = self.handed if count is None else self.acked + count

    @rule(count=st.integers(1, 60))
    def fail(self, count: int) -> None:
        count = min(count, self.handed - self.acked)
        if not count:
            return
        for index in range(self.acked, self.acked + count):
            self.tries[index] += 1
        dead = 0
        while dead < count and self.tries[self.acked + dead] >= self.most:
            self.dead.append(self.sent[self.acked + dead])
            dead += 1
        assert self.rx.nack(count) == dead
        self.acked += dead
        self.handed = self.acked

    @rule(new=st.integers(0, 20), limit=st.integers(1, 30), done=st.integers(0, 20), failed=st.integers(0, 20))
    def turn(self, new: int, limit: int, done: int, failed: int) -> None:
        """What workers do all day: some come, some are done, some fail."""
        self.send(new + 1, together=new % 2 == 0)
        self.receive_many(limit)
        self.receive_one()
        self.acknowledge(done)
        self.fail(failed + 1)

    @rule(index=st.integers(0, 200))
    def seek(self, index: int) -> None:
        target = min(index, len(self.sent))
        self.rx.seek(self.at(target))
        self.tries = [tries if index >= target else 0 for index, tries in enumerate(self.tries)]
        self.handed = self.acked = target

    @rule()
    def rotate(self) -> None:
        self.channel.rotate()
        self.channel.compact()

    @rule(closed=st.booleans())
    def start_again(self, closed: bool) -> None:
        if closed:
            self.rx.close()
        self.channel.close()
        self.handed = self.acked
        self.open()

    @invariant()
    def it_stands_where_it_should(self) -> None:
        if hasattr(self, "rx"):
            assert self.rx.unacked == self.handed - self.acked
            assert self.rx.held == self.at(self.acked)
            assert self.rx.position == self.at(self.handed)
            assert self.channel.stats().receivers == {"worker": self.at(self.acked)}


def test_a_named_receiver_matches_the_reference_model() -> None:
    run_state_machine_as_test(Acks, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))
