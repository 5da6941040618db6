"""Promise: whatever a reader has seen stays, whenever the writer is killed, and the next writer goes on behind it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
import xchannel_load as load

from penstock.errors import LockedError
from penstock.log.xchannel import Reader, Writer, XChannelLog, cleanup

FEWEST = 5
"""So many rounds there are, however long they take."""


class Seen:
    """Every position and number a reader was given, in order."""

    def __init__(self) -> None:
        self.positions: list[np.ndarray] = []
        self.following = 0

    def take(self, reader: Reader) -> int:
        batch = reader.read_batch()
        if len(batch):
            numbers = load.numbers_of(batch).astype(np.int64)
            assert int(numbers[0]) == self.following
            assert (np.diff(numbers) == 1).all()
            self.following = int(numbers[-1]) + 1
            self.positions.append(batch.positions)
        return len(batch)

    def all(self) -> np.ndarray:
        return np.concatenate(self.positions) if self.positions else np.empty(0, np.int64)


@pytest.mark.timeout(7200)
def test_what_readers_saw_survives_kill_9_and_the_next_writer_continues(tmp_path: Path, long_run: bool) -> None:
    rng = random.Random(4)
    for turn in range(25 if long_run else 1):  # a channel of thousands of files says no more, only later
        kill_writers(str(tmp_path / f"chan{turn}"), rng, 20 if long_run else 60, 600 if long_run else 5)


def kill_writers(path: str, rng: random.Random, rounds: int, seconds: float) -> None:
    """Kill one writer after another on one channel, and compare what readers were given."""
    context = load.processes()
    Writer.precreate(path, region_bytes=4096)
    seen = Seen()
    deadline = time.monotonic() + seconds
    done = mended = 0
    with Reader.open(path) as attached:
        while done < rounds and (done < FEWEST or seen.following <= done or time.monotonic() < deadline):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=load.write_until_killed, args=(path, rng.getrandbits(32), seen.following, theirs), daemon=True
            )
            process.start()
            theirs.close()
            assert ours.poll(60), "the writer did not start"
            ours.recv()
            until = time.monotonic() + rng.random() * 0.02
            live = Reader.open(path, "latest")
            live_seen = [np.empty(0, np.uint64)]
            while time.monotonic() < until:
                seen.take(attached)
                live_seen += [load.numbers_of(live.read_batch(100))]
            process.kill()
            process.join()
            ours.close()
            while seen.take(attached):
                pass
            while len(batch := live.read_batch()):
                live_seen.append(load.numbers_of(batch))
            live.close()
            numbers = np.concatenate(live_seen).astype(np.int64)
            assert (np.diff(numbers) == 1).all()
            assert not len(numbers) or int(numbers[-1]) == seen.following - 1

            fresh = Seen()
            with Reader.open(path) as late:
                while fresh.take(late):
                    pass
            assert fresh.following == seen.following
            assert (fresh.all() == seen.all()).all()
            with XChannelLog(path) as log:
                mended += bool([problem for problem in log.verify() if "next writer mends" in problem.reason])
            done += 1
    assert seen.following > done, "the writers hardly wrote: nothing was tested"
    with Writer.open(path) as writer:  # the last one comes and goes in peace
        writer.append(load.payload(seen.following))
    with XChannelLog(path) as log:
        assert [str(problem) for problem in log.verify()] == []
    cleanup(path)
    print(f"{done} kills, {seen.following} records, {mended} times a writer died between a commit and its counters")


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    path = str(tmp_path / "chan")
    context = load.processes()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=load.write_until_killed, args=(path, 1, 0, theirs), daemon=True)
    process.start()
    assert ours.poll(60)
    with pytest.raises(LockedError, match="another writer has it open"):
        Writer.open(path)
    process.kill()
    process.join()
    Writer.open(path).close()
