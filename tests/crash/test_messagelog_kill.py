"""Promise: what append returned for survives kill -9, and the log goes on with the next number."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.log.messagelog import MessageLog, MessageLogOptions, MessageLogReader

CHILD = """
import os, sys
from penstock.log.messagelog import MessageLog, MessageLogOptions
log = MessageLog.open(sys.argv[1], MessageLogOptions(segment_bytes=20_000, sync=sys.argv[2]))
out = sys.stdout
seq = log.next_position
while True:
    if seq % 3:
        assert log.append(b"%d" % seq * (seq % 50), sender="ann@localhost") == seq
        seq += 1
    else:
        numbers = log.append_many([b"%d" % n * (n % 50) for n in range(seq, seq + 40)], sender="bob@localhost")
        seq = int(numbers[-1]) + 1
    out.write(f"{seq - 1}\\n")
    out.flush()
"""


def test_what_was_appended_survives_kill_9(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    rounds = 220 if request.config.getoption("--long", default=False) else 6
    rng = random.Random(7)
    folder = tmp_path / "log"
    promised = 0
    for number in range(rounds):
        mode = ("none", "interval", "always")[number % 3]
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), mode], stdout=subprocess.PIPE, env=os.environ, text=True
        )
        assert child.stdout is not None
        line = child.stdout.readline()  # it is at work
        assert line, "the child could not open the log"
        time.sleep(rng.random() * 0.05)
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().splitlines()
        child.wait()
        child.stdout.close()
        promised = max(promised, *(int(text) for text in [line, *rest] if text.strip().isdigit()))
        check(folder, promised)
        with MessageLog.open(folder, MessageLogOptions(segment_bytes=20_000)) as log:
            assert log.repairs == []
            assert log.last_seq >= promised
            log.drop_before(promised - 100)
    assert promised > rounds
    with MessageLog.open(folder, MessageLogOptions(segment_bytes=20_000)) as log:
        assert log.append(b"on") >= promised + 1
    with MessageLogReader(folder) as log:
        assert list(log.verify()) == []


def check(folder: Path, promised: int) -> None:
    """Every number up to what was promised is there once, with its payload."""
    with MessageLogReader(folder) as log:
        first = log.first_position
        found = list(log.entries(limit=1 << 40))
    assert [entry.seq for entry in found] == list(range(first, first + len(found)))
    assert found[-1].seq >= promised
    assert all(entry.payload == b"%d" % entry.seq * (entry.seq % 50) for entry in found)
