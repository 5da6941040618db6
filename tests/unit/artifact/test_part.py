"""Export rounds as a part: a running fold is published while it goes on, and trouble is waited out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.artifact import ExportPart, transport_for
from penstock.errors import OptionsError
from penstock.fold import Follow
from penstock.kv import EmbeddedConnection
from penstock.lifecycle import Part, State
from penstock.log.detect import open_log
from penstock.log.envelope import Envelope, encode_envelope
from penstock.log.messagelog import MessageLog
from penstock.node.supervisor import Spec, Supervisor
from penstock.store import AppendLogStore


async def until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("leased", [False, True])
async def test_a_running_fold_is_published_again_and_again_by_a_part(tmp_path: Path, leased: bool) -> None:
    up = str(tmp_path / "up")
    writer = MessageLog.open(tmp_path / "log", content="envelope/1")
    log, store, stop = open_log(str(tmp_path / "log")), AppendLogStore.open(tmp_path / "fold.snap"), asyncio.Event()
    running: list[Follow] = []
    made: list[ExportPart] = []

    def make() -> Part:
        leases = (lambda: EmbeddedConnection(str(tmp_path / "leases"))) if leased else None
        part = ExportPart(
            lambda: running[0] if running else None, up, "routes",
            every_seconds=0.02, leases=leases, holder="me", scratch=tmp_path, ttl_seconds=0.5,
        )  # fmt: skip
        made.append(part)
        return part

    supervisor = Supervisor([Spec("export:routes", make)])
    await supervisor.start()
    try:
        await until(lambda: made and made[0].health().state is State.DEGRADED)  # there is no fold yet
        fold = Follow(log, store, stop=stop)
        task = asyncio.create_task(fold.run())
        running.append(fold)
        for number in (1, 2):
            writer.append(encode_envelope(Envelope(b"k%d" % number, b"v")))
            await until(lambda wanted=number + 1: _rank(up) == wanted)
        await until(lambda: made[0].describe()["cursor"] == 3)
        await until(lambda: made[0]._seen == fold.cursor)  # an export that began just before is followed by another one
        assert made[0].health().state is State.READY
        rounds = made[0].rounds
        await asyncio.sleep(0.2)
        assert made[0].rounds == rounds  # nothing new, so nothing is exported
        stop.set()
        await task
    finally:
        await supervisor.stop(1.0)
        for opened in (log, store, writer):
            opened.close()
    with pytest.raises(OptionsError):
        ExportPart(lambda: None, up, "routes", every_seconds=0)


def _rank(up: str) -> int:
    try:
        return transport_for(up).manifest("routes").rank
    except FileNotFoundError:
        return -1


async def test_a_round_that_meets_what_nobody_expected_is_tried_again(tmp_path: Path) -> None:
    class Odd:
        rounds = 0

        async def between_flushes(self, call: Any) -> Any:
            Odd.rounds += 1
            raise KeyError("nobody expected this")

    part = ExportPart(Odd, str(tmp_path / "up"), "routes", every_seconds=0.02, scratch=tmp_path)
    await part.start()
    await until(lambda: Odd.rounds > 2)
    assert part.health().state is State.DEGRADED
    assert "nobody expected" in part.health().reason
    await part.stop()
