"""Promise: whenever the process is killed, no acknowledged change is lost, no number is used twice, and no change is
there by half.

A child works on many channels at once and notes what it begins and what was acknowledged.  It is killed with SIGKILL
at a random moment; what a new manager finds must be the acknowledged state, or that and the one change that was under
way.  The short form takes seconds; ``--long`` runs 1,000 channels with 100,000 memberships for 200 rounds.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.channels import ChannelManager, FileChannelStore, Limits, ManagerOptions, Nid, PersistedChannel
from penstock.channels.model import ChannelType, StoredConfig
from penstock.disk import PosixDisk
from penstock.log.messagelog.fifo_cursor import save_cursor

OWNER = "owner@localhost"
OPTIONS = ManagerOptions(
    limits=Limits(
        max_channels=1 << 20,
        max_channels_per_client=1 << 20,
        max_clients_per_channel=1 << 20,
        max_persist_messages=1 << 20,
        max_history_limit=1 << 20,
    ),
    segment_bytes=512,
)


# --- The child


async def work(root: str, journal: str, seed: int, channels: int) -> None:
    """Change channels at random until killed; note each change before it begins and after it is acknowledged."""
    rng = random.Random(seed)
    notes = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    manager = await ChannelManager.open(root, OPTIONS)

    async def one(handler: str, turn: int) -> None:
        channel = manager.channel(handler)
        members = {str(nid) for nid in await channel.members(OWNER)}
        someone = f"user{rng.randrange(150)}@localhost"
        kinds = ["push", "pop", "member"] if handler.startswith("queue") else ["broadcast", "member"]
        kind = rng.choice(kinds)
        text = f"{seed}/{handler}/{turn}"
        if kind == "member":
            kind = "leave" if someone in members else "join"
            text = someone
        elif kind == "pop":
            if not await channel.length(OWNER):
                return
            text = ""
        os.write(notes, f"begin {handler} {kind} {text}\n".encode())
        answer: Any = None
        if kind == "join":
            await channel.join(someone)
        elif kind == "leave":
            await channel.leave(someone)
        elif kind == "broadcast":
            answer = await channel.broadcast(OWNER, text.encode())
        elif kind == "push":
            await channel.push(OWNER, text.encode())
        else:
            answer = (await channel.pop(OWNER)).payload.decode()
        os.write(notes, f"done {handler} {kind} {answer}\n".encode())

    async def worker(handlers: list[str]) -> None:
        turn = 0
        while True:
            turn += 1
            await one(rng.choice(handlers), turn)

    names = handlers_of(channels)
    workers = 16 if seed % 2 else 1  # one alone has its messages synced on the event loop
    os.write(notes, b"ready\n")
    await asyncio.gather(*(worker(names[start::workers]) for start in range(min(workers, channels))))


# --- The parent


def handlers_of(channels: int) -> list[str]:
    return [f"queue/{number}" if number % 4 == 0 else f"ops/{number}" for number in range(channels)]


class Model:
    """What one channel must be, by what was acknowledged."""

    def __init__(self, members: set[str]) -> None:
        self.members = members
        self.stored: dict[int, str] = {}  # number -> payload of acknowledged broadcasts
        self.queue: list[str] = []
        self.popped: set[str] = set()
        self.highest = 0
        self.pending: tuple[str, str] | None = None

    def note(self, line: list[str]) -> None:
        moment, kind, text = line[0], line[2], line[3] if len(line) > 3 else ""
        if moment == "begin":
            assert self.pending is None
            self.pending = (kind, text)
            return
        assert self.pending is not None
        began, self.pending = self.pending, None
        if kind == "broadcast":
            number = int(text)
            assert number > self.highest, f"number {number} was used before"
            self.highest = number
            self.stored[number] = began[1]
        elif kind == "pop":
            assert text not in self.popped, f"{text} was handed out twice"
            assert self.queue
            assert self.queue.pop(0) == text
            self.popped.add(text)
        else:
            self.apply(*began)

    def apply(self, kind: str, text: str) -> None:
        if kind == "join":
            self.members.add(text)
        elif kind == "leave":
            self.members.discard(text)
        elif kind == "push":
            self.queue.append(text)
        elif kind == "pop":
            self.popped.add(self.queue.pop(0))

    async def check(self, channel: Any, *, fifo: bool) -> None:
        """Compare with what a restart found, and settle what was under way: it happened whole or not at all."""
        found = {str(nid) for nid in await channel.members(OWNER)}
        pending, self.pending = self.pending, None
        if pending is not None and pending[0] in ("join", "leave") and found != self.members:
            self.apply(*pending)
        assert found == self.members
        if fifo:
            length = await channel.length(OWNER)
            if pending is not None and pending[0] in ("push", "pop") and length != len(self.queue):
                self.apply(*pending)
            assert length == len(self.queue)
            return
        entries = {entry.seq: entry.payload.decode() for entry in await channel.history(OWNER, 1, 1 << 20)}
        for number in sorted(entries.keys() - self.stored.keys()):
            assert pending == ("broadcast", entries[number]), "a message nobody sent"
            assert number > self.highest
            self.stored[number] = entries[number]
            self.highest = number
        assert entries == self.stored


def lay_out(root: str, channels: int, members: int) -> dict[str, Model]:
    store, models = FileChannelStore(root), {}
    store.make_root()
    for handler in handlers_of(channels):
        names = {OWNER, *(f"user{number}@localhost" for number in range(members))}
        fifo = handler.startswith("queue")
        kind = ChannelType.FIFO if fifo else ChannelType.PUBSUB
        config = StoredConfig(1000, 65_536, 1 << 20, True, 0)
        nids = tuple(sorted(map(Nid.parse, names)))
        digest = store.save(PersistedChannel(handler, Nid.parse(OWNER), config, members=nids, channel_type=kind))
        if fifo:
            save_cursor(PosixDisk(), store.folder(digest), 1)
        models[handler] = Model(names)
    return models


def run_and_kill(root: str, journal: str, seed: int, channels: int, seconds: float) -> None:
    command = [sys.executable, __file__, root, journal, str(seed), str(channels)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not (os.path.exists(journal) and os.path.getsize(journal)):
            assert child.poll() is None, child.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(seconds)
        assert child.poll() is None, child.communicate()[1].decode()
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()


async def check_all(root: str, models: dict[str, Model], touched: set[str]) -> None:
    async with await ChannelManager.open(root, OPTIONS) as manager:
        assert manager.broken == {}
        assert manager.handlers() == sorted(models)
        for handler in sorted(touched):
            await models[handler].check(manager.channel(handler), fifo=handler.startswith("queue"))


async def drain(root: str, models: dict[str, Model]) -> None:
    """At the end: every queue gives exactly what is left, in order, and numbers go on above all of before."""
    async with await ChannelManager.open(root, OPTIONS) as manager:
        for handler, model in models.items():
            channel = manager.channel(handler)
            if handler.startswith("queue"):
                popped = [(await channel.pop(OWNER)).payload.decode() for _ in range(await channel.length(OWNER))]
                assert popped == model.queue
            else:
                assert await channel.broadcast(OWNER, b"after all") > model.highest


def test_no_kill_loses_reuses_or_halves_anything(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    long = request.config.getoption("--long", default=False)
    channels, members, rounds = (1000, 100, 200) if long else (16, 8, 6)
    root = str(tmp_path / "data")
    models = lay_out(root, channels, members)
    rng = random.Random(7)
    acknowledged = 0
    for number in itertools.count():
        if number >= rounds and (acknowledged > rounds or number >= 10 * rounds):
            break  # on a busy machine it takes some more until there is something to lose
        journal = str(tmp_path / f"journal-{number}")
        run_and_kill(root, journal, number, channels, rng.uniform(0.1, 2.0 if long else 0.4))
        touched = set()
        for line in Path(journal).read_text().splitlines()[1:]:
            words = line.split(" ")
            touched.add(words[1])
            models[words[1]].note(words)
            acknowledged += words[0] == "done"
        asyncio.run(check_all(root, models, touched))
        os.unlink(journal)
    assert acknowledged > rounds, "the child hardly worked: nothing was tested"
    asyncio.run(drain(root, models))


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
