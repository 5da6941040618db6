"""kill -9 of workers and senders of a shared queue, at any moment.

Promises held here: every message that was sent is finished by somebody in the end; no message has two live leases at
once; a worker that was killed gives its messages back after their lease; what several processes send arrives whole,
each sender's in its order.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from penstock.log.filechannel import FileChannel

ROUNDS, LONG_ROUNDS = 3, 300

SENDER = """
import os, random, sys
from penstock.log.filechannel import FileChannel
path, who, start, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rng = random.Random(seed)
queue, number = FileChannel.share(path, sync="none", segment_bytes=20_000), start
while True:
    count = 1 if rng.random() < 0.5 else rng.randrange(1, 20)
    payloads = [b"%s %d " % (who.encode(), number + n) + b"x" * rng.randrange(100) for n in range(count)]
    if count == 1:
        queue.append(payloads[0])
    else:
        queue.append_many(payloads)
    number += count
    os.write(1, b"%d\\n" % number)
"""

# Works on messages, and tells when each lease begins (before the work) and ends (after the ack has returned).
WORKER = """
import os, random, sys, time
from penstock.errors import LeaseLost
from penstock.log.filechannel import FileChannel
path, seed, lease = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
rng = random.Random(seed)
group = FileChannel.attach(path).group("workers", lease_seconds=lease, retry_seconds=0.01)
def say(what, job):
    os.write(1, b"%s %d %.6f %d\\n" % (what, job.position, time.monotonic(), job.tries))
while True:
    for job in group.take_many(rng.randrange(1, 8), timeout=1):
        say(b"took", job)
        try:
            if rng.random() < 0.1:
                job.fail(delay=0)
                say(b"gave", job)
            else:
                job.ack()
                say(b"done", job)
        except LeaseLost:
            say(b"lost", job)
"""


def spawn(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


def kill(process: subprocess.Popen[bytes]) -> list[list[bytes]]:
    process.send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, err.decode()
    return [line.split() for line in out[: out.rfind(b"\n") + 1].splitlines()]


def wait_for_lines(process: subprocess.Popen[bytes], count: int) -> list[list[bytes]]:
    assert process.stdout is not None
    lines = []
    for _ in range(count):
        line = process.stdout.readline()
        assert line, process.communicate()[1].decode()
        lines.append(line.split())
    return lines


def drain(path: Path) -> set[int]:
    """Finish what is left, as a worker that nobody kills, and return the positions."""
    done: set[int] = set()
    with FileChannel.attach(path) as view:
        group = view.group("workers")
        while group.stats().oldest_position is not None:
            jobs = group.take_many(1000, timeout=1)
            done.update(job.position for job in jobs)
            jobs.ack()
    return done


@pytest.mark.parametrize("seed", [1])
def test_no_message_is_lost_when_senders_and_workers_are_killed(tmp_path: Path, seed: int, long_run: bool) -> None:
    path, rng = tmp_path / "jobs", random.Random(seed)
    FileChannel.share(path, sync="none").close()
    with FileChannel.attach(path) as view:
        watch = view.ack_rx("watch")  # keeps every message for the comparison at the end
    sent = Counter[str]()
    told: list[list[bytes]] = []
    for number in range(LONG_ROUNDS if long_run else ROUNDS):
        senders = {who: spawn(SENDER, path, who, sent[who], rng.randrange(10**9)) for who in ("ann", "bob")}
        workers = [spawn(WORKER, path, seed * 1000 + number * 10 + n, 1.0) for n in range(2)]
        for who, sender in senders.items():
            sent[who] = int(wait_for_lines(sender, 3)[-1][0])
        told += wait_for_lines(workers[0], 2)
        time.sleep(rng.random() * 0.05)
        for who, sender in senders.items():
            for line in kill(sender):
                sent[who] = int(line[0])
        for worker in workers:
            told += kill(worker)
        with FileChannel.attach(path) as view:  # a message may have been sent that nobody was told of
            numbers = [payload.split()[:2] for batch in view.rx().batches(timeout=0) for payload in batch.to_payloads()]
        for who in senders:
            own = [int(one) for name, one in numbers if name == who.encode()]
            assert own == list(range(len(own)))
            assert len(own) >= sent[who]
            sent[who] = len(own)
    del watch
    finished = drain(path) | {int(line[1]) for line in told if line[0] == b"done"}
    with FileChannel.attach(path) as view:
        everything = {position for batch in view.rx().batches(timeout=0) for position in batch.positions.tolist()}
    acknowledged = {int(line[1]) for line in told if line[0] in (b"done", b"took")}  # killed between ack and its line
    assert everything <= finished | acknowledged
    assert everything - finished <= {int(line[1]) for line in told if line[0] == b"took"}
    no_two_at_once(told)


def no_two_at_once(told: list[list[bytes]]) -> None:
    """Check that each message was handed out with a number of tries of its own: two live leases would share one."""
    takes = Counter((int(line[1]), int(line[3])) for line in told if line[0] == b"took")
    assert max(takes.values()) == 1
    by_message: dict[int, list[tuple[int, float]]] = {}
    for what, position, at, tries in told:
        if what == b"took":
            by_message.setdefault(int(position), []).append((int(tries), float(at)))
    for handed in by_message.values():
        times = [at for _, at in sorted(handed)]
        assert times == sorted(times)


def test_a_killed_worker_gives_its_messages_back_after_their_lease(tmp_path: Path) -> None:
    path = tmp_path / "jobs"
    with FileChannel.open(path, sync="none") as queue:
        queue.append_many([b"%d" % n for n in range(50)])
    code = """
import os, sys
from penstock.log.filechannel import FileChannel
group = FileChannel.attach(sys.argv[1]).group("workers", lease_seconds=1.5)
jobs = group.take_many(50)
jobs[0].ack()
os.write(1, b"taken\\n")
os.read(0, 1)
"""
    command = [sys.executable, "-c", code, str(path)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"taken\n"
    with FileChannel.attach(path) as view:
        group = view.group("workers")
        assert group.take_many(1, timeout=2.0) == []  # longer than a lease: its heartbeat keeps them
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=60)
        found = []
        while len(found) < 49:
            jobs = group.take_many(100, timeout=60)
            assert jobs
            assert all(job.tries == 2 for job in jobs)
            found += [int(job.payload) for job in jobs]
            jobs.ack()
    assert sorted(found) == list(range(1, 50))


def test_heartbeats_get_their_turn_beside_busy_workers(tmp_path: Path) -> None:
    path = tmp_path / "jobs"
    with FileChannel.share(path, sync="none") as queue:
        queue.append(b"long work")
        group = FileChannel.attach(path).group("workers", lease_seconds=2.0)
        held = group.take()
        queue.append_many([b"short work"] * 200_000)
        busy = [spawn(WORKER, path, seed, 30.0) for seed in range(2)]
        for worker in busy:
            wait_for_lines(worker, 10)
        until = time.monotonic() + 6.0  # three leases
        while time.monotonic() < until:
            for worker in busy:
                assert all(int(line[1]) != held.position for line in wait_for_lines(worker, 50))
        assert not held.lost
        held.ack()
        for worker in busy:
            kill(worker)
