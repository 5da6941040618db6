"""Promise: a fold that is killed at any moment goes on, and equals a plain recomputation after every restart."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.log import open_log
from penstock.log.envelope import Envelope, decode_envelope, encode_envelope
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.store import AppendLogOptions, AppendLogStore
from penstock.types import Op

WRITER = """
import random, sys, time
from penstock.log.envelope import Envelope, encode_envelope
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.types import Op
log = MessageLog.open(sys.argv[1], MessageLogOptions(sync="none", content="envelope/1", segment_bytes=50_000))
rng, ops = random.Random(int(sys.argv[2])), [Op.PUT] * 5 + [Op.DELETE]
while log.next_position < int(sys.argv[3]):
    log.append_many([
        encode_envelope(Envelope(b"k%d" % rng.randrange(200), rng.randbytes(rng.randrange(60)), rng.choice(ops)))
        for _ in range(rng.randrange(1, 40))
    ])
    time.sleep(0.003)
"""

FOLLOWER = """
import asyncio, sys
from penstock.fold import FollowOptions, follow
from penstock.log import open_log
from penstock.store import AppendLogOptions, AppendLogStore
log = open_log(sys.argv[1])
store = AppendLogStore.open(sys.argv[2], AppendLogOptions(compact_threshold_bytes=20_000))
options = FollowOptions(batch_records=int(sys.argv[3]))
report = lambda cursor: print(cursor.token.as_int(), flush=True)
asyncio.run(follow(log, store, on_applied=report, options=options))
"""


def recomputed(path: Path, stop: int) -> dict[str, tuple[bytes, int]]:
    """Return the fold of the records below ``stop``, one by one."""
    state: dict[str, tuple[bytes, int]] = {}
    with open_log(str(path)) as log:
        position = log.first_position
        while len(batch := log.read(position)):
            for record in batch:
                if record.position >= stop:
                    return state
                found = decode_envelope(record.payload)
                key = found.key.decode()
                if found.op is Op.PUT:
                    state[key] = (found.payload, record.position)
                else:
                    state.pop(key, None)
            position = batch.next_position
    return state


def test_the_fold_equals_a_recomputation_after_every_kill(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    rounds, records = (60, "5000000") if request.config.getoption("--long", default=False) else (3, "1000000")
    rng = random.Random(11)
    log, snap = tmp_path / "log", tmp_path / "fold.snap"
    with MessageLog.open(log, MessageLogOptions(content="envelope/1")) as first:
        first.append(encode_envelope(Envelope(b"k0", b"first")))  # an empty folder is not known for a log
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(log), "1", records])
    try:
        reached = 0
        for number in range(rounds):
            command = [sys.executable, "-c", FOLLOWER, str(log), str(snap), str(rng.choice([3, 50, 5000]))]
            follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert follower.stdout is not None
            lines = [follower.stdout.readline()]
            assert lines[0], "the follower could not begin"
            time.sleep(rng.random() * 0.2)
            follower.send_signal(signal.SIGKILL)
            lines += follower.communicate(timeout=60)[0].splitlines()
            if number == rounds // 2:  # its other side may die as well
                writer.kill()
                writer.wait(60)
                writer = subprocess.Popen([sys.executable, "-c", WRITER, str(log), "2", records])
            with AppendLogStore.open(snap, AppendLogOptions(unfinished="drop"), read_only=True) as store:
                cursor = store.cursor().token.as_int() or 0
                found = {entry.key: (entry.value, entry.version.as_int()) for entry in store.range()}
            whole = [int(line) for line in lines[:-1] if line.strip()]
            assert cursor >= max([reached, *whole])  # what was reported is in the store
            assert found == recomputed(log, cursor)
            reached = cursor
        assert reached > 1
    finally:
        writer.kill()
        writer.wait(60)
