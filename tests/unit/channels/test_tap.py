"""Promise: a message that a tap cannot copy takes no other along."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.channels import commands as c
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.wire.tap import COPIED, LOST, ChannelTap
from penstock.log.detect import open_log


def run(seq: int, *payloads: bytes) -> c.Messages:
    return c.Messages(ChannelId("ops", "localhost"), Nid("ann", "localhost"), seq, 1767225600000, payloads)


async def test_a_message_that_cannot_be_copied_takes_no_other_along(tmp_path: Path) -> None:
    copied, lost = COPIED.value(), LOST.value()
    tap = ChannelTap("ops", str(tmp_path / "ops"), max_payload_bytes=10)
    await tap.open()
    for heard in (run(1, b"one", b"two"), run(3, b"far too large for it"), run(4, b"four")):
        tap(heard)  # all in one turn of the loop: they are written together
    await tap.close()
    with open_log(str(tmp_path / "ops")) as log:
        assert log.read(log.first_position, 10).to_payloads() == [b"one", b"two", b"four"]
    assert (COPIED.value() - copied, LOST.value() - lost) == (3, 1)


@pytest.mark.parametrize(("room", "most"), [("ROOM", 3), ("ROOM_BYTES", 12)])
async def test_what_waits_for_the_disk_is_bounded_by_number_and_by_bytes(
    room: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """65,536 messages of 64 KiB are all the memory there is."""
    monkeypatch.setattr(f"penstock.channels.wire.tap.{room}", most)
    lost = LOST.value()
    tap = ChannelTap("ops", str(tmp_path / "ops"))
    await tap.open()
    for turn in range(2):  # there is room again when it was written
        for seq in range(1, 6):
            tap(run(10 * turn + seq, b"%d/%d." % (turn, seq)))
        while tap._task is not None:
            await asyncio.wait([tap._task])
    await tap.close()
    with open_log(str(tmp_path / "ops")) as log:
        kept = log.read(log.first_position, 10).to_payloads()
    assert kept == [b"%d/%d." % (turn, seq) for turn in range(2) for seq in range(1, 4)]
    assert LOST.value() - lost == 4
    assert caplog.text.count("the disk is too slow") == caplog.text.count("2 messages did not fit") == 2  # not for each


@pytest.mark.parametrize("room", ["ROOM", "ROOM_BYTES"])
async def test_a_run_of_more_than_there_is_room_for_is_copied_where_nothing_waits(
    room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that broadcasts very many at once lost the copy of all of them, on the quickest disk."""
    monkeypatch.setattr(f"penstock.channels.wire.tap.{room}", 3)
    lost = LOST.value()
    tap = ChannelTap("ops", str(tmp_path / "ops"))
    await tap.open()
    tap(run(1, *[b"%d" % seq for seq in range(6)]))
    tap(run(7, b"one too many"))
    await tap.close()
    with open_log(str(tmp_path / "ops")) as log:
        assert log.read(log.first_position, 10).to_payloads() == [b"%d" % seq for seq in range(6)]
    assert LOST.value() - lost == 1


async def test_a_tap_takes_what_its_server_takes(tmp_path: Path) -> None:
    tap = ChannelTap("*", str(tmp_path / "all"), max_payload_bytes=100_000)
    await tap.open()
    tap(run(1, b"x" * 100_000))
    await tap.close()
    with open_log(str(tmp_path / "all")) as log:
        assert [len(payload) for payload in log.read(log.first_position, 10).to_payloads()] == [100_000]
