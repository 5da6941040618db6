"""The lease has the bytes of the reference, one holder at a time, and never stops a fleet for ever."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from artifact_vectors import load

from penstock.artifact import ExportLease
from penstock.artifact.lease import LeaseRecord, decode_lease, encode_lease
from penstock.errors import CorruptionError, OptionsError
from penstock.kv import EmbeddedConnection
from penstock.testing.clock import FakeClock
from penstock.types import WatchCursor

VECTORS = load("lease/lease.json")


@pytest.fixture
async def bucket(tmp_path: Path) -> AsyncIterator[Any]:
    async with EmbeddedConnection(tmp_path / "buckets") as connection:
        yield await connection.store("leases")


def lease(bucket: Any, holder: str, clock: FakeClock | None = None) -> ExportLease:
    return ExportLease(bucket, "export", holder, clock=clock or FakeClock())


@pytest.mark.parametrize("step", VECTORS["life"], ids=lambda step: step["step"])
def test_a_record_of_the_reference_is_written_again_byte_for_byte(step: dict[str, Any]) -> None:
    if not step.get("raw") or not step["raw"]["value_hex"]:
        return
    data = bytes.fromhex(step["raw"]["value_hex"])
    assert encode_lease(decode_lease(data)) == data


@pytest.mark.parametrize("case", VECTORS["planted"], ids=lambda case: case["name"])
async def test_a_planted_record_is_stolen_or_respected_as_by_the_reference(case: dict[str, Any], bucket: Any) -> None:
    value = bytes.fromhex(case["value_hex"]) if "value_hex" in case else case["value_text"].encode()
    await bucket.writer.put("export", value)
    now = VECTORS["planted_now_unix"]
    guard = await lease(bucket, "me", FakeClock(now_ns=now * 10**9)).try_acquire(300)
    assert (guard is not None) == case["try_acquire_wins"]
    if guard is not None:
        await guard.abandon()


async def test_one_of_many_gets_the_lease(bucket: Any) -> None:
    guards = await asyncio.gather(*(lease(bucket, f"n{n}").try_acquire(300) for n in range(8)))
    (won,) = [guard for guard in guards if guard is not None]
    assert (await lease(bucket, "x").current()) == won.record
    await won.abandon()
    again = await lease(bucket, "x").try_acquire(300)
    assert again is not None
    await again.abandon()


async def test_a_dropped_lease_is_held_until_it_ends_and_then_stolen(
    bucket: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    guard = await lease(bucket, "a", clock).try_acquire(300)
    with caplog.at_level(logging.WARNING):
        del guard
        gc.collect()
    assert "dropped" in caplog.text
    assert await lease(bucket, "b", clock).try_acquire(300) is None
    clock.pass_(300)  # exactly at its end it is free
    stolen = await lease(bucket, "b", clock).try_acquire(300)
    assert stolen is not None
    await stolen.abandon()


async def test_completion_is_there_for_all_to_see_and_a_late_one_changes_nothing(bucket: Any) -> None:
    clock = FakeClock()
    first = await lease(bucket, "a", clock).try_acquire(10)
    assert first is not None
    clock.pass_(20)
    second = await lease(bucket, "b", clock).try_acquire(10)
    assert second is not None
    assert await first.complete(WatchCursor.of(1)) is False
    await first.abandon()  # nor does giving up what another has now
    assert await second.complete(WatchCursor.of(42)) is True
    current = await lease(bucket, "c", clock).current()
    assert current is not None
    assert (current.holder_id, current.completed_cursor_hex) == ("b", "000000000000002a")
    assert await lease(bucket, "c", clock).try_acquire(10) is None  # a completed lease still holds to its end


async def test_a_lease_whose_holder_died_vanishes_by_the_clock_of_the_bucket(bucket: Any) -> None:
    guard = await lease(bucket, "a").try_acquire(1.0)  # this clock stands still
    assert guard is not None
    async with asyncio.timeout(60):
        while await bucket.reader.entry("export") is not None:
            await asyncio.sleep(0.05)
    next_one = await lease(bucket, "b").try_acquire(300)
    assert next_one is not None
    await next_one.abandon()
    await guard.abandon()


async def test_a_completed_record_stays_when_the_lease_has_ended(bucket: Any) -> None:
    guard = await lease(bucket, "a").try_acquire(1.0)
    assert guard is not None
    await guard.complete(WatchCursor.of(7))
    await asyncio.sleep(1.2)
    current = await lease(bucket, "b").current()
    assert current is not None
    assert current.completed_cursor_hex == "0000000000000007"


async def test_a_time_that_cannot_be_is_refused(bucket: Any) -> None:
    with pytest.raises(OptionsError):
        await lease(bucket, "a").try_acquire(-1)


def test_unknown_fields_and_nulls_are_read() -> None:
    text = b'{"holder_id":"a","acquired_at_unix":1,"expires_at_unix":2,"completed_at_unix":null,"more":[1.5]}'
    assert decode_lease(text) == LeaseRecord("a", 1, 2)
    for bad in (b"", b"[]", b'{"holder_id":"a"}', b'{"holder_id":"a","acquired_at_unix":1.5,"expires_at_unix":2}'):
        with pytest.raises(CorruptionError):
            decode_lease(bad)
