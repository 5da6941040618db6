"""kill -9 of whoever sends, receives or compresses, at any moment.

Promises held here: what a send returned for is visible for ever after, in order; a named receiver sees every message at
least once and resumes exactly at its first unacknowledged one.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.log.filechannel import ChannelOptions, FileChannel, FileChannelLog
from penstock.testing.log_conformance import contents

ROUNDS, LONG_ROUNDS = 4, 500

# Sends numbered messages one by one and in batches, and says which number is visible after each send.
SENDER = """
import os, random, sys
from penstock.log.filechannel import ChannelOptions, FileChannel
path, start, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
options = ChannelOptions(sync="interval", sync_seconds=0.01, segment_bytes=rng.choice((2000, 30000)),
                         compression=rng.choice(("snappy", "gzip")))
channel, number = FileChannel.open(path, options), start
while True:
    if rng.random() < 0.5:
        count = 1
        channel.append(b"%d " % number + b"x" * rng.randrange(200))
    else:
        count = rng.randrange(1, 40)
        channel.append_many([b"%d " % (number + n) + b"y" * rng.randrange(200) for n in range(count)])
    number += count
    os.write(1, b"%d\\n" % number)
"""

# Receives under a name, says what it received before it acknowledges, and what it acknowledged after.
RECEIVER = """
import os, random, sys
from penstock.log.filechannel import FileChannel
path, seed = sys.argv[1], int(sys.argv[2])
rng = random.Random(seed)
rx = FileChannel.attach(path).ack_rx("worker")
while True:
    batch = rx.recv_many(rng.randrange(1, 30), timeout=60)
    numbers = [int(payload.split()[0]) for payload in batch.to_payloads()]
    if not numbers:
        continue
    os.write(1, b"got %d %d\\n" % (numbers[0], numbers[-1]))
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    count = rng.randrange(1, len(numbers) + 1)
    waiting = rx.unacked
    rx.ack(count)
    oldest = numbers[-1] + 1 - (waiting - count)
    os.write(1, b"acked %d\\n" % oldest)
"""


def spawn(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


def kill(process: subprocess.Popen[bytes]) -> list[bytes]:
    process.send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, err.decode()
    whole = out[: out.rfind(b"\n") + 1]
    return whole.splitlines()


def numbers(path: str) -> list[int]:
    with FileChannelLog(path) as log:
        return [int(payload.split()[0]) for payload in contents(log)]


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    return LONG_ROUNDS if request.config.getoption("--long", default=False) else ROUNDS


def test_nothing_visible_is_lost_when_the_sender_or_its_compressor_is_killed(tmp_path: Path, rounds: int) -> None:
    path, rng, promised = str(tmp_path / "c"), random.Random(os.environ.get("SEED", "1")), 0
    for number in range(rounds):
        sender = spawn(SENDER, path, promised, number)
        assert sender.stdout is not None
        first = sender.stdout.readline()
        time.sleep(rng.random() * 0.05)
        said = [first, *kill(sender)]
        visible = int(said[-1])
        found = numbers(path)
        assert found[: visible - found[0]] == list(range(found[0], visible))
        assert found == list(range(found[0], found[-1] + 1))  # whole and in order, past what was promised too
        with FileChannel.open(path, ChannelOptions(sync="none", collect=False)) as channel:
            rest = [int(p.split()[0]) for batch in channel.ack_rx().batches(timeout=0) for p in batch.to_payloads()]
        assert rest == found
        promised = found[-1] + 1
        if number % 20 == 19:  # let the old ones go, so that a long run stays small
            with FileChannel.open(path) as channel:
                for _ in channel.rx().batches(timeout=0):
                    pass


def test_a_named_receiver_resumes_at_its_first_unacknowledged_message(tmp_path: Path, rounds: int) -> None:
    path, rng = str(tmp_path / "c"), random.Random(os.environ.get("SEED", "2"))
    promised = acked = seen = 0
    FileChannel.open(path).close()
    with FileChannel.attach(path) as view:
        view.ack_rx("worker").close()  # it holds from here on
    for number in range(rounds):
        sender = spawn(SENDER, path, promised, number)
        assert sender.stdout is not None
        said = [sender.stdout.readline()]
        receiver = spawn(RECEIVER, path, number)
        assert receiver.stdout is not None
        lines = [receiver.stdout.readline().rstrip()]
        time.sleep(rng.random() * 0.05)
        first, second = (sender, receiver) if rng.random() < 0.5 else (receiver, sender)
        killed = {first: kill(first)}
        time.sleep(rng.random() * 0.02)
        killed[second] = kill(second)
        said += killed[sender]
        lines += killed[receiver]
        got = [tuple(map(int, line.split()[1:])) for line in lines if line.startswith(b"got")]
        # The ack that was said, or one that was written just before the process died.
        assert acked <= got[0][0] <= seen if number else got[0][0] == 0
        start = got[0][0]
        for low, high in got:
            assert low == start  # every message, none twice within a life
            start = high + 1
        seen = max(seen, start)
        said_acks = [int(line.split()[1]) for line in lines if line.startswith(b"acked")]
        acked = max([acked, *said_acks])
        found = numbers(path)
        assert found[-1] + 1 >= int(said[-1])
        assert found[0] <= seen  # nothing was collected that no ack can have covered, said or only written
        promised = found[-1] + 1
    with FileChannel.open(path) as channel:
        rx = channel.ack_rx("worker")
        rest = [int(p.split()[0]) for batch in rx.batches(timeout=0) for p in batch.to_payloads()]
        assert rest == list(range(rest[0], promised))
        assert acked <= rest[0] <= seen


# Sends one by one as fast as it can, which is without a system call, and says now and then which number was sent.
SINGLE = """
import os, random, sys
from penstock.log.filechannel import FileChannel
path, number, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
channel = FileChannel.open(path, sync="interval", sync_seconds=0.005, segment_bytes=4 << 20, compression="none")
tx, rx = channel.tx(), channel.rx(start="latest")
while True:
    for _ in range(rng.randrange(1, 3000)):
        tx.send(b"%d " % number + b"x" * (number * 7 % 300))
        number += 1
    os.write(1, b"%d\\n" % number)
    rx.recv_many(100_000)
"""


def test_single_sends_survive_a_kill_at_any_moment(tmp_path: Path, long_run: bool) -> None:
    path, number, rng = tmp_path / "jobs", 0, random.Random(7)
    for round_ in range(LONG_ROUNDS if long_run else ROUNDS):
        sender = spawn(SINGLE, path, number, rng.randrange(10**9))
        assert sender.stdout is not None
        for _ in range(2):
            told = int(sender.stdout.readline())
        time.sleep(rng.random() * 0.05)
        told = max([told, *(int(line) for line in kill(sender))])
        found = numbers(str(path))
        assert found[-1] + 1 >= told
        assert found == list(range(found[0], found[-1] + 1)), round_
        number = found[-1] + 1
        with FileChannelLog(path) as log:
            before = log.next_position
        with FileChannel.open(path, sync="none", compression="none") as channel:
            assert channel.stats().write_position == before
            assert numbers(str(path))[-1] + 1 == number
