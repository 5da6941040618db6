"""Promise: members, owners, lists and limits follow the protocol's rules, and everyone hears what concerns them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from channel_use import ANN, BOB, CAT, EVE, refused

from penstock.channels import ChannelManager, ChannelMessage, Event, Limits, ManagerOptions, Nid, commands as c
from penstock.channels.actor import MAX_WAITING
from penstock.channels.postcard import MAX_METADATA_BYTES
from penstock.channels.store import CURSOR, METADATA, METADATA_TMP
from penstock.errors import Backpressure, ClosedError, OptionsError


def told(session: Any) -> list[tuple[Any, ...]]:
    return [
        (event.kind, event.nid and str(event.nid), event.owner) if isinstance(event, Event) else (event.seq,)
        for event in session.waiting()
    ]


async def team(manager: ChannelManager, *members: str) -> Any:
    ops = manager.channel("ops")
    for member in members:
        await ops.join(member)
    return ops


async def test_who_comes_first_owns_the_channel(start: Any) -> None:
    manager = await start()
    sessions = {who: manager.connect(who) for who in (ANN, BOB)}
    ops = await team(manager, ANN, BOB)
    assert told(sessions[ANN]) == [("MEMBER_JOINED", ANN, True), ("MEMBER_JOINED", BOB, False)]
    assert told(sessions[BOB]) == [("MEMBER_JOINED", BOB, False)]
    with refused("FORBIDDEN"):
        await ops.delete(BOB)
    assert manager.channels(ANN, owner=True).items == ("!ops@localhost",)
    assert manager.channels(BOB, owner=True).items == ()


async def test_the_session_that_asks_is_told_by_its_answer_alone(start: Any) -> None:
    manager = await start()
    asking, other = manager.connect(ANN), manager.connect(ANN)
    await manager.channel("ops").join(ANN, source=asking)
    assert told(asking) == []
    assert told(other) == [("MEMBER_JOINED", ANN, True)]
    await manager.channel("ops").broadcast(ANN, b"x", source=asking)
    assert told(asking) == []
    assert told(other) == [(1,)]


async def test_an_owner_lets_others_in_and_out(start: Any) -> None:
    manager = await start()
    ops = await team(manager, ANN)
    with refused("FORBIDDEN"):
        await manager.channel("new").join(ANN, on_behalf=BOB)
    assert manager.handlers() == ["ops"]
    await ops.join(ANN, on_behalf=BOB)
    with refused("FORBIDDEN"):
        await ops.join(BOB, on_behalf=CAT)
    session = manager.connect(BOB)
    await ops.leave(ANN, on_behalf=BOB)
    assert told(session) == [("MEMBER_LEFT", BOB, False)]
    with refused("USER_NOT_IN_CHANNEL"):
        await ops.leave(ANN, on_behalf=BOB)
    await ops.join(CAT)
    with refused("FORBIDDEN"):
        await ops.leave(CAT, on_behalf=ANN)


async def test_the_first_in_nid_order_inherits(start: Any) -> None:
    manager = await start()
    ops = await team(manager, CAT, BOB, ANN)
    session = manager.connect(BOB)
    await ops.leave(CAT)
    assert told(session) == [("MEMBER_LEFT", CAT, True), ("MEMBER_JOINED", ANN, True)]
    await ops.configure(ANN, max_clients=5)


async def test_the_last_to_leave_ends_the_channel(start: Any) -> None:
    manager = await start()
    ops = await team(manager, ANN)
    await ops.leave(ANN)
    assert manager.handlers() == []
    for ask in (ops.leave(ANN), ops.members(ANN), ops.config(ANN), ops.broadcast(ANN, b"x"), ops.delete(ANN)):
        with refused("CHANNEL_NOT_FOUND"):
            await ask
    await ops.join(BOB)
    assert await ops.broadcast(BOB, b"x") == 1  # a new channel with new numbers


async def test_a_deleted_channel_says_goodbye(start: Any) -> None:
    manager = await start()
    ops = await team(manager, ANN, BOB)
    session = manager.connect(BOB)
    await ops.delete(ANN)
    assert told(session) == [("CHANNEL_DELETED", None, None)]
    assert manager.channels(BOB).items == ()


async def test_limits_are_checked_in_order(start: Any) -> None:
    limits = Limits(max_channels=2, max_channels_per_client=2, max_clients_per_channel=2)
    manager = await start(ManagerOptions(limits=limits))
    ops = await team(manager, ANN, BOB)
    with refused("USER_IN_CHANNEL"):
        await ops.join(BOB)
    with refused("CHANNEL_IS_FULL"):
        await ops.join(CAT)
    await manager.channel("two").join(ANN)
    with refused("RESOURCE_LIMIT_REACHED", "maximum channels reached"):
        await manager.channel("three").join(EVE)
    await ops.leave(BOB)
    await manager.channel("two").leave(ANN)
    await manager.channel("two").join(ANN)


async def test_the_number_of_channels_of_a_client_is_limited(start: Any) -> None:
    manager = await start(ManagerOptions(limits=Limits(max_channels_per_client=1)))
    await manager.channel("one").join(ANN)
    with refused("POLICY_VIOLATION", "subscription limit reached"):
        await manager.channel("two").join(ANN)
    assert manager.handlers() == ["one"]  # the channel that would have been made is not there


async def test_joins_at_the_same_time_do_not_slip_through_a_limit(start: Any) -> None:
    manager = await start(ManagerOptions(limits=Limits(max_clients_per_channel=5)))
    ops = await team(manager, ANN)
    await ops.configure(ANN, persist=True)
    joins = (ops.join(f"user{number}@localhost") for number in range(10))
    answers = await asyncio.gather(*joins, return_exceptions=True)
    assert [str(answer) for answer in answers] == ["None"] * 4 + ["CHANNEL_IS_FULL"] * 6


async def test_lists_decide_who_joins_publishes_and_reads(start: Any) -> None:
    manager = await start()
    ops = await team(manager, ANN, BOB, CAT)
    await ops.allow(ANN, "join", [BOB])
    with refused("NOT_ALLOWED"):
        await ops.join(EVE)
    await ops.allow(ANN, "publish", [BOB])
    with refused("NOT_ALLOWED"):
        await ops.broadcast(ANN, b"owners are no exception")
    sessions = {who: manager.connect(who) for who in (ANN, BOB, CAT)}
    await ops.allow(ANN, "read", [CAT])
    assert await ops.broadcast(BOB, b"x") == 1
    assert [told(sessions[who]) for who in (ANN, BOB, CAT)] == [[], [], [(1,)]]
    await ops.disallow(ANN, "read", [CAT])
    await ops.broadcast(BOB, b"y")
    assert [told(sessions[who]) for who in (ANN, BOB, CAT)] == [[(2,)]] * 3
    with refused("FORBIDDEN"):
        await ops.allow(BOB, "read", [BOB])
    with refused("FORBIDDEN"):
        await ops.allowed(BOB, "join")
    assert await ops.allowed(ANN, "join") == [Nid.parse(BOB)]


async def test_a_list_has_no_more_names_than_the_channel_has_places(start: Any) -> None:
    manager = await start()
    ops = await team(manager, ANN)
    await ops.configure(ANN, max_clients=2)
    with refused("POLICY_VIOLATION", "ACL allow list exceeds max entries"):
        await ops.allow(ANN, "read", [ANN, BOB, CAT])
    assert await ops.allowed(ANN, "read") == []
    await ops.allow(ANN, "read", [ANN, BOB, "example.com", "x.io"])
    assert len(await ops.allowed(ANN, "read")) == 4


async def test_settings_stay_within_the_limits_of_the_server(start: Any) -> None:
    manager = await start()
    ops = await team(manager, ANN, BOB)
    for field, limit in (
        ("max_clients", 100),
        ("max_payload_size", 65_536),
        ("max_persist_messages", 1000),
        ("message_flush_interval", 60_000),
    ):
        await ops.configure(ANN, **{field: limit})
        with refused("BAD_REQUEST", f"{field} exceeds server established limit"):
            await ops.configure(ANN, **{field: limit + 1})
    with refused("FORBIDDEN"):
        await ops.configure(BOB, max_clients=3)
    with refused("FORBIDDEN"):
        await ops.config(EVE)
    await ops.configure(ANN, max_clients=1)  # evicts nobody
    assert len(await ops.members(ANN)) == 2


async def test_a_message_too_large_spends_a_number(start: Any) -> None:
    manager = await start()
    ops = await team(manager, ANN)
    await ops.configure(ANN, max_payload_size=3)
    with refused("POLICY_VIOLATION", "payload size exceeds channel limit"):
        await ops.broadcast(ANN, b"four")
    assert await ops.broadcast(ANN, b"ok") == 2
    with refused("FORBIDDEN"):
        await ops.broadcast(EVE, b"x")


async def test_an_empty_message_is_refused_because_no_frame_can_carry_it(start: Any) -> None:
    manager = await start()
    ops = await team(manager, ANN)
    for ask in (ops.broadcast(ANN, b""), ops.broadcast_many(ANN, [b"x", b""])):
        with refused("BAD_REQUEST", "length field must be non-zero"):
            await ask
    assert await ops.broadcast(ANN, b"x") == 1


async def test_members_and_channels_come_in_pages(start: Any) -> None:
    manager = await start()
    names = [f"user{number}@localhost" for number in range(5)]
    ops = await team(manager, *names)
    assert [str(nid) for nid in await ops.members(names[0])] == names
    for number in range(4):
        await manager.channel(f"more/{number}").join(names[0])
    pages = [manager.channels(names[0], page=page, page_size=2) for page in (1, 2, 3, 4)]
    assert [len(page.items) for page in pages] == [2, 2, 1, 0]
    assert [(page.page, page.page_size, page.total) for page in pages] == [(n, 2, 5) for n in (1, 2, 3, 4)]
    assert manager.channels(names[0], page=0).items == ()
    with refused("USER_NOT_IN_CHANNEL"):
        await ops.members(EVE)


async def test_members_and_lists_are_asked_for_page_by_page(start: Any) -> None:
    manager = await start()
    names = [f"user{number}@localhost" for number in range(5)]
    ops = await team(manager, *names)
    await ops.allow(names[0], "read", names)
    ann = Nid.parse(names[0])
    for ask in (partial(c.Members, ops.id, ann), partial(c.GetAcl, ops.id, ann, "read")):
        pages = [await manager.submit(ask(page, 2)) for page in (1, 2, 3, 4)]
        assert [list(map(str, page.items)) for page in pages] == [names[:2], names[2:4], names[4:], []]
        assert [(page.page, page.page_size, page.total) for page in pages] == [(n, 2, 5) for n in (1, 2, 3, 4)]
        whole = await manager.submit(ask())
        assert (list(map(str, whole.items)), whole.page, whole.page_size, whole.total) == (names, None, None, None)
    for page, size in ((1, None), (None, 2)):  # of a list both must be given
        whole = await manager.submit(c.GetAcl(ops.id, ann, "read", page, size))
        assert (len(whole.items), whole.total) == (5, None)


async def test_pages_have_the_sizes_of_the_protocol(start: Any) -> None:
    manager = await start(ManagerOptions(limits=Limits(max_clients_per_channel=200, max_channels_per_client=200)))
    names = [f"user{number:03}@localhost" for number in range(120)]
    ops = await team(manager, *names)
    await ops.allow(names[0], "join", names)
    for number in range(60):
        await manager.channel(f"more/{number}").join(names[0])
    ann = Nid.parse(names[0])
    members = [await manager.submit(c.Members(ops.id, ann, 1, size)) for size in (None, 1000, 0)]
    assert [len(page.items) for page in members] == [20, 100, 0]
    channels = [manager.channels(ann, page_size=size) for size in (None, 1000, 0)]
    assert [len(page.items) for page in channels] == [20, 50, 0]
    assert len((await manager.submit(c.GetAcl(ops.id, ann, "join", 1, 1000))).items) == 120  # a list has no cap


def test_the_limits_are_those_of_the_original() -> None:
    assert Limits() == Limits(
        max_channels=5000, max_clients_per_channel=100, max_channels_per_client=100, max_payload_size=65_536,
        max_persist_messages=1000, max_message_flush_interval=60_000, max_history_limit=100,
    )  # fmt: skip
    assert (ManagerOptions().segment_bytes, MAX_WAITING) == (134_217_728, 16_384)
    assert (METADATA, METADATA_TMP, CURSOR, MAX_METADATA_BYTES) == (
        "metadata.bin", "metadata.bin.tmp", "cursor.bin", 67_108_864,
    )  # fmt: skip


async def test_a_channel_that_cannot_keep_up_says_so(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.channels.actor.MAX_WAITING", 5)
    manager = await start()
    ops = await team(manager, ANN)
    await ops.configure(ANN, persist=True)
    answers = await asyncio.gather(*(ops.broadcast(ANN, b"x") for _ in range(8)), return_exceptions=True)
    assert answers[:5] == [1, 2, 3, 4, 5]
    assert [type(answer) for answer in answers[5:]] == [Backpressure] * 3
    assert "5 commands wait" in str(answers[5])
    assert await ops.broadcast(ANN, b"y") == 6  # what was turned away spent no number


async def test_more_members_than_a_page_holds_are_all_listed(start: Any) -> None:
    manager = await start(ManagerOptions(limits=Limits(max_clients_per_channel=1000)))
    ops = await team(manager, *(f"user{number:03}@localhost" for number in range(250)))
    assert len(await ops.members("user000@localhost")) == 250


async def test_channels_of_another_domain_are_not_served_here(start: Any) -> None:
    manager = await start()
    there = manager.channel("!ops@elsewhere.org")
    for ask in (there.join(ANN), there.leave(ANN), there.delete(ANN), there.broadcast(ANN, b"x"), there.members(ANN)):
        with refused("NOT_IMPLEMENTED"):
            await ask
    for ask in (there.allow(ANN, "read", [ANN]), there.allowed(ANN, "read"), there.configure(ANN, max_clients=1)):
        with refused("NOT_ALLOWED"):
            await ask
    with refused("CHANNEL_NOT_FOUND"):
        await there.config(ANN)


async def test_with_the_last_session_transient_channels_are_left(start: Any) -> None:
    manager = await start()
    transient = await team(manager, ANN, BOB)
    kept = manager.channel("kept")
    await kept.join(ANN)
    await kept.configure(ANN, persist=True)
    first, second, watching = manager.connect(ANN), manager.connect(ANN), manager.connect(BOB)
    await first.close()
    assert len(await transient.members(BOB)) == 2
    await second.close()
    assert told(watching) == [("MEMBER_LEFT", ANN, True), ("MEMBER_JOINED", BOB, True)]
    assert manager.channels(ANN).items == ("!kept@localhost",)
    assert not manager.is_connected(ANN)


async def test_without_authentication_everything_is_left(start: Any) -> None:
    manager = await start(ManagerOptions(authenticated=False))
    async with manager.connect(ANN):
        await team(manager, ANN)
    assert manager.handlers() == []


async def test_a_session_is_iterated_until_it_is_closed(start: Any) -> None:
    manager = await start()
    ops = await team(manager, ANN, BOB)
    session = manager.connect(BOB)
    heard = []

    async def listen() -> None:
        heard.extend([event.payload async for event in session if isinstance(event, ChannelMessage)])

    listening = asyncio.create_task(listen())
    for payload in (b"one", b"two"):
        await ops.broadcast(ANN, payload)
        await asyncio.sleep(0)
    session.end()
    await listening
    assert heard == [b"one", b"two"]


async def test_a_session_that_does_not_read_ends_instead_of_growing(start: Any) -> None:
    manager = await start()
    ops = await team(manager, ANN, BOB)
    session = manager.connect(BOB, inbox_size=2)
    for _ in range(5):
        await ops.broadcast(ANN, b"x")
    seen = aiter(session)
    assert [(await anext(seen)).seq, (await anext(seen)).seq] == [1, 2]
    with pytest.raises(Backpressure, match="more than 2 events"):
        await anext(seen)


async def test_a_sink_and_a_listener_hear_at_once(start: Any) -> None:
    manager = await start()
    heard: list[Any] = []
    manager.listen(heard.append)
    manager.connect(BOB, sink=heard.append)
    ops = await team(manager, ANN, BOB)
    heard.clear()
    await ops.broadcast(ANN, b"x")
    assert [run.first_seq for run in heard] == [1, 1]


async def test_a_closed_manager_says_so(start: Any) -> None:
    manager = await start()
    ops = await team(manager, ANN)
    await manager.close()
    with pytest.raises(ClosedError, match="closed"):
        await ops.join(BOB)


async def test_names_are_checked_before_anything_is_asked(start: Any) -> None:
    manager = await start()
    with pytest.raises(OptionsError, match="invalid channel handler"):
        manager.channel("no good")
    with pytest.raises(OptionsError, match="invalid NID format"):
        await manager.channel("ops").join("nobody")


async def test_logs_used_long_ago_are_closed_and_opened_again(start: Any) -> None:
    manager = await start(ManagerOptions(max_open_logs=3))
    channels = [manager.channel(f"ops/{number}") for number in range(10)]
    for channel in channels:
        await channel.join(ANN)
        await channel.configure(ANN, persist=True, message_flush_interval=60_000)
    for turn in range(1, 4):
        assert await asyncio.gather(*(channel.broadcast(ANN, b"x") for channel in channels)) == [turn] * 10
    for channel in channels:
        await channel.history(ANN)
    while sum(actor.files.is_open for actor in manager._actors.values()) > 3:
        await asyncio.sleep(0.001)
    assert [len(await channel.history(ANN)) for channel in channels] == [3] * 10


async def test_a_caller_that_gives_up_leaves_the_channel_in_order(start: Any) -> None:
    manager = await start()
    ops = await team(manager, ANN)
    await ops.configure(ANN, persist=True)
    join = asyncio.create_task(ops.join(BOB))
    await asyncio.sleep(0)
    join.cancel()
    await asyncio.gather(join, return_exceptions=True)
    await ops.join(CAT)
    assert len(await ops.members(ANN)) == 3  # it was under way, and went through
    assert [str(nid) for nid in await (await start()).channel("ops").members(ANN)] == [ANN, BOB, CAT]
