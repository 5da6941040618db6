"""Power cuts of a machine whose workers share a queue.

Promise held here: a message that was synced and not acknowledged is handed out after a power cut, whatever the cut left
of the group's journal and cursor, and also if it has the position of one that was lost.  One that was acknowledged may
come again.
"""

from __future__ import annotations

import random

import pytest

from penstock.disk import MemoryDisk
from penstock.log.filechannel import FileChannel
from penstock.testing.faulty import FaultyDisk

ROUNDS, LONG_ROUNDS = 60, 5_000


def one_life(seed: int) -> None:
    rng = random.Random(seed)
    disk = FaultyDisk(MemoryDisk())
    sent: dict[int, bytes] = {}
    acknowledged: set[int] = set()
    for life in range(3):
        queue = FileChannel.open(
            "jobs", sync=rng.choice(("none", "always")), compression="none", segment_bytes=300, disk=disk
        )
        end = queue.stats().write_position  # what was behind it is gone, and its positions are used again
        assert all(position < end for position in sent), f"seed {seed}"
        acknowledged = {position for position in acknowledged if position < end}
        if rng.random() < 0.5:  # a group may be opened long after its queue
            payloads = [b"%d early" % life] * rng.randrange(1, 30)
            sent.update(zip(queue.append_many(payloads).tolist(), payloads, strict=True))
            queue.sync()
        group = queue.group("workers", heartbeat=False, retry_seconds=0.0, on_damage="skip")
        jobs = []
        for _ in range(rng.randrange(1, 30)):
            match rng.randrange(5):
                case 0 | 1:
                    payloads = [b"%d %d" % (life, rng.randrange(1000)) for _ in range(rng.randrange(1, 6))]
                    positions = queue.append_many(payloads).tolist()
                    if queue.options.sync == "always" or rng.random() < 0.5:
                        queue.sync()
                        sent.update(zip(positions, payloads, strict=True))
                case 2:
                    jobs += group.take_many(rng.randrange(1, 6))
                case 3 if jobs:
                    job = jobs.pop(rng.randrange(len(jobs)))
                    job.ack()
                    acknowledged.add(job.position)
                case 4 if jobs:
                    jobs.pop(rng.randrange(len(jobs))).fail(delay=0.0, reason="no")
                case _:
                    pass
        disk.cut_power(seed=rng.randrange(10**6), keep=rng.random())
        group.forked()
        queue.forked()
    queue = FileChannel.open("jobs", sync="none", compression="none", disk=disk)
    end = queue.stats().write_position
    acknowledged = {position for position in acknowledged if position < end}
    group = queue.group("workers", heartbeat=False, on_damage="skip")  # sync="none" may leave gaps, which are told
    found = {job.position: job.payload for job in group.take_many(100_000)}
    lost = {position: payload for position, payload in sent.items() if position not in acknowledged | found.keys()}
    assert not lost, f"seed {seed}"
    assert all(found[position] == payload for position, payload in sent.items() if position in found), f"seed {seed}"
    assert group.take_many(1) == []
    queue.close()


@pytest.mark.parametrize("part", range(2))
def test_a_synced_message_that_nobody_acknowledged_is_handed_out_after_power_cuts(part: int, long_run: bool) -> None:
    rounds = LONG_ROUNDS if long_run else ROUNDS
    for seed in range(part * rounds, (part + 1) * rounds):
        one_life(seed)
