"""Promise: messages reach sessions in the runs they were sent in, and what a receiver does reaches nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from channel_use import ANN, BOB, CAT, persistent

from penstock.channels import ChannelMessage, Event, commands as c
from penstock.errors import Backpressure, OptionsError
from penstock.metrics import REGISTRY


def broken(_: Any) -> None:
    raise RuntimeError("this sink is broken")


async def test_a_run_of_broadcasts_reaches_every_session_as_one_and_the_same_run(start: Any) -> None:
    manager = await start()
    ops = manager.channel("ops")
    for who in (ANN, BOB, CAT):
        await ops.join(who)
    heard: dict[str, list[c.Delivery]] = {BOB: [], CAT: []}
    for who, runs in heard.items():
        manager.connect(who, sink=runs.append)
    assert await ops.broadcast_many(ANN, [b"a", b"b", b"c"]) == range(1, 4)
    (run,), (same,) = heard[BOB], heard[CAT]
    assert run is same  # so what one of them makes of it serves the others
    assert isinstance(run, c.Messages)
    assert (run.first_seq, run.payloads, len(run)) == (1, (b"a", b"b", b"c"), 3)


@pytest.mark.parametrize("settings", [{}, {"message_flush_interval": 100}, {"message_flush_interval": 0}])
async def test_a_sink_that_raises_leaves_every_caller_answered_and_every_other_told(start: Any, settings: Any) -> None:
    manager = await start()
    ops = await persistent(manager, "ops", ANN, BOB, CAT, **settings)
    sick = manager.connect(BOB, sink=broken)
    well = manager.connect(CAT)
    before = REGISTRY.counter("channel_receiver_failures", "", ("who",)).value(who="sink")
    async with asyncio.timeout(30):
        assert await asyncio.gather(*(ops.broadcast(ANN, b"x") for _ in range(3))) == [1, 2, 3]
        await ops.leave(ANN)
    assert [event.seq for event in well.waiting() if isinstance(event, ChannelMessage)] == [1, 2, 3]
    assert isinstance(sick.error, RuntimeError)
    assert REGISTRY.counter("channel_receiver_failures", "", ("who",)).value(who="sink") == before + 1  # told no more


async def test_a_sink_that_cancels_disturbs_nobody(start: Any) -> None:
    manager = await start()
    ops = await persistent(manager, "ops", ANN, BOB)

    def cancels(_: Any) -> None:
        raise asyncio.CancelledError

    manager.connect(BOB, sink=cancels)
    async with asyncio.timeout(30):
        assert await ops.broadcast(ANN, b"x") == 1
        assert await ops.broadcast(ANN, b"y") == 2


@pytest.mark.parametrize("persist", [False, True])
async def test_a_listener_that_raises_leaves_every_caller_answered(start: Any, persist: bool) -> None:
    manager = await start()
    ops = manager.channel("ops")
    for who in (ANN, BOB):
        await ops.join(who)
    await ops.configure(ANN, persist=persist)
    heard: list[c.Delivery] = []
    manager.listen(broken)
    manager.listen(heard.append)
    async with asyncio.timeout(30):
        assert await ops.broadcast(ANN, b"x") == 1
    assert len(heard) == 1


async def test_a_listener_can_be_removed_even_while_it_is_called(start: Any) -> None:
    manager = await start()
    ops = manager.channel("ops")
    await ops.join(ANN)
    heard: list[c.Delivery] = []

    def once(event: c.Delivery) -> None:
        heard.append(event)
        manager.unlisten(once)

    manager.listen(once)
    await ops.broadcast(ANN, b"x")
    await ops.broadcast(ANN, b"y")
    assert len(heard) == 1
    with pytest.raises(OptionsError, match="does not listen"):
        manager.unlisten(once)


async def test_a_session_hands_out_runs_or_messages_as_the_caller_asks(start: Any) -> None:
    manager = await start()
    ops = manager.channel("ops")
    for who in (ANN, BOB):
        await ops.join(who)
    session = manager.connect(BOB)
    await ops.broadcast_many(ANN, [b"a", b"b"])
    run = await anext(aiter(session.runs()))
    assert isinstance(run, c.Messages)
    assert run.payloads == (b"a", b"b")
    await ops.broadcast_many(ANN, [b"c", b"d"])
    seen = aiter(session)
    assert [(await anext(seen)).payload for _ in range(2)] == [b"c", b"d"]  # type: ignore[union-attr]


async def test_who_stops_in_the_middle_of_a_run_finds_the_rest_of_it(start: Any) -> None:
    manager = await start()
    ops = manager.channel("ops")
    await ops.join(ANN)
    await ops.join(BOB)
    session = manager.connect(BOB)
    await ops.broadcast_many(ANN, [b"a", b"b", b"c", b"d"])
    await ops.broadcast_many(ANN, [b"e", b"f"])
    async for one in session:
        assert isinstance(one, ChannelMessage)
        assert one.seq == 1
        break
    async for event in session.runs():
        assert isinstance(event, c.Messages)
        assert (event.first_seq, event.payloads, len(event)) == (2, (b"b", b"c", b"d"), 3)
        break
    async for one in session:
        assert isinstance(one, ChannelMessage)
        assert one.payload == b"e"
        break
    assert [one.seq for one in session.waiting() if isinstance(one, ChannelMessage)] == [6]
    assert session._size == 0


async def test_iterations_that_share_a_session_take_nothing_from_each_other(start: Any) -> None:
    manager = await start()
    ops = manager.channel("ops")
    await ops.join(ANN)
    await ops.join(BOB)
    session = manager.connect(BOB)
    for _ in range(3):
        await ops.broadcast_many(ANN, [b"x"] * 3)
    one, other = aiter(session), aiter(session)
    found = [await anext(each) for each in (one, other, other, other, one)]
    await other.aclose()  # type: ignore[attr-defined]
    found += [await anext(one), *session.waiting()]
    assert [message.seq for message in found if isinstance(message, ChannelMessage)] == list(range(1, 10))


async def test_a_full_session_takes_what_fits_of_a_run_and_then_ends(start: Any) -> None:
    manager = await start()
    ops = manager.channel("ops")
    for who in (ANN, BOB):
        await ops.join(who)
    session = manager.connect(BOB, inbox_size=3)
    await ops.broadcast_many(ANN, [b"%d" % number for number in range(5)])
    seen = aiter(session)
    assert [(await anext(seen)).seq for _ in range(3)] == [1, 2, 3]  # type: ignore[union-attr]
    with pytest.raises(Backpressure, match="more than 3 events"):
        await anext(seen)


async def test_a_full_session_that_may_drop_counts_what_it_dropped_and_goes_on(start: Any) -> None:
    manager = await start()
    ops = manager.channel("ops")
    for who in (ANN, BOB):
        await ops.join(who)
    session = manager.connect(BOB, inbox_size=3, when_full="drop")
    await ops.broadcast_many(ANN, [b"%d" % number for number in range(5)])
    await ops.broadcast(ANN, b"five")
    assert session.dropped == 3
    assert [event.seq for event in session.waiting() if isinstance(event, ChannelMessage)] == [1, 2, 3]
    await ops.broadcast(ANN, b"six")
    assert [event.seq for event in session.waiting() if isinstance(event, ChannelMessage)] == [7]


async def test_what_moderates_hears_an_event_first_and_can_withhold_it(start: Any) -> None:
    manager = await start()
    ops = manager.channel("ops")
    session = manager.connect(ANN)
    asked: list[str] = []

    async def gate(event: Event) -> None:
        await asyncio.sleep(0)
        asked.append(event.kind)
        if event.nid is not None and event.nid.username == "bob":
            raise RuntimeError("the moderator is away")

    manager.event_gate = gate
    await ops.join(ANN)
    await ops.join(BOB)  # joined all the same: only the event is withheld
    await ops.join(CAT)
    assert asked == ["MEMBER_JOINED"] * 3
    assert [str(event.nid) for event in session.waiting() if isinstance(event, Event)] == [ANN, CAT]
    assert [str(nid) for nid in await ops.members(ANN)] == [ANN, BOB, CAT]


async def test_a_channel_whose_end_cannot_be_told_to_what_moderates_is_not_deleted(start: Any) -> None:
    manager = await start()
    ops = manager.channel("ops")
    await ops.join(ANN)

    async def gate(event: Event) -> None:
        raise RuntimeError(event.kind)

    manager.event_gate = gate
    with pytest.raises(RuntimeError, match="CHANNEL_DELETED"):
        await ops.delete(ANN)
    assert manager.handlers() == ["ops"]


async def test_who_comes_back_while_its_channels_are_being_left_stays_in_what_it_joins(start: Any) -> None:
    manager = await start()
    told, go_on = asyncio.Event(), asyncio.Event()
    first, second = manager.channel("a"), manager.channel("b")
    session = manager.connect(ANN)
    manager.connect(BOB)
    for channel in (first, second):
        await channel.join(BOB)
        await channel.join(ANN)

    async def gate(event: Event) -> None:
        if event.kind == "MEMBER_LEFT" and event.channel.handler == "a":
            told.set()
            await go_on.wait()

    manager.event_gate = gate
    leaving = asyncio.create_task(session.close())
    await told.wait()  # whoever moderates is slow to hear of the first channel
    manager.connect(ANN)
    await second.join(ANN)
    go_on.set()
    await leaving
    assert [str(nid) for nid in await second.members(BOB)] == [ANN, BOB]
    assert [str(nid) for nid in await first.members(BOB)] == [BOB]


async def test_a_payload_may_be_any_buffer_and_is_heard_as_bytes(start: Any) -> None:
    """What its owner changes later changes nothing that was said."""
    manager = await start()
    heard = manager.connect(BOB)
    ops = manager.channel("ops")
    await ops.join(ANN)
    await ops.join(BOB)
    given = bytearray(b"hi")
    await ops.broadcast(ANN, given)
    await ops.broadcast_many(ANN, [given, memoryview(given)])
    given[:] = b"no"
    payloads = [item.payload for item in heard.waiting() if isinstance(item, ChannelMessage)]
    assert payloads == [b"hi"] * 3
    assert {type(payload) for payload in payloads} == {bytes}
    with pytest.raises(TypeError):
        await ops.broadcast(ANN, "hi")  # type: ignore[arg-type]
