"""Promise: what a caller asks of a client is answered, refused or given up, and harms nobody else's requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from client_use import GREETING, LIMITS, WELCOME, answering, enter, heard, pretending, serving
from wire_use import SECONDS, options

from penstock.channels.wire import BlockingClient, ChannelServer, Client
from penstock.errors import ClosedError, NotConnected, OptionsError, Refused, Timeout


async def test_a_server_that_does_not_answer_is_no_connection() -> None:
    async with pretending() as (place, _):
        with pytest.raises(NotConnected, match="no answer"):
            await Client.connect(place, username="ann", timeout=0.05)


@pytest.mark.parametrize(
    "script",
    [
        (b"AUTH_ACK succeeded=true nid=ann@localhost\n",),
        (GREETING, b"CONNECT_ACK auth_required=false " + LIMITS + b"\n"),
        (GREETING, WELCOME, b"JOIN_ACK id=1 channel=!a@localhost\n"),
        (GREETING, WELCOME, b"BROADCAST_ACK id=1 seq=5\n"),
    ],
    ids=["connect", "login", "request", "number"],
)
async def test_an_answer_to_something_else_is_no_answer(script: tuple[bytes, ...]) -> None:
    """It ended in a KeyError, and a client that was coming back so never did."""
    async with answering(script) as (place, _), asyncio.timeout(SECONDS):
        with pytest.raises(NotConnected, match=r"answered .* with"):
            await Client.connect(place, username="ann")


async def test_no_answer_is_an_error_in_time() -> None:
    limits = b"heartbeat_interval=60000 max_inflight_requests=5 max_message_size=4096 max_payload_size=4096"
    hello = b"CONNECT_ACK auth_required=false " + limits + b" max_subscriptions=5\n"
    async with (
        pretending(hello, b"IDENTIFY_ACK nid=ann@localhost\n") as (place, _),
        await Client.connect(place, username="ann", timeout=0.3) as ann,
    ):
        for asked in (ann.broadcast("c", b"x"), ann.broadcast_many("c", [b"x"]), ann.history("c"), ann.join("c")):
            with pytest.raises(Timeout, match="no answer to"):
                await asked


async def test_runs_and_single_broadcasts_of_one_client_do_not_wait_for_each_other_for_ever(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, await enter(server, "ann") as ann, asyncio.timeout(SECONDS):
        await ann.join("c")
        await ann.configure("c", persist=True)
        singles = [asyncio.ensure_future(ann.broadcast("c", b"one")) for _ in range(50)]
        await asyncio.sleep(0)  # they have half of what the server allows
        runs = [asyncio.ensure_future(ann.broadcast_many("c", [b"run"] * 100)) for _ in range(3)]
        numbers = [await single for single in singles] + [number for run in runs for number in await run]
        assert sorted(numbers) == list(range(1, 351))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda client: client.broadcast("c", b""),
        lambda client: client.broadcast("c", b"x", qos=2),
        lambda client: client.broadcast_many("c", [b"x", b""]),
        lambda client: client.broadcast_many("c", [b"x"], qos=-1),
        lambda client: client.push("c", b""),
        lambda client: client.history("c", 0),
        lambda client: client.history("c", 1, 0),
        lambda client: client.history("c", -1),
        lambda client: client.allow("c", "read", ["eve@localhost\nLEAVE id=1 channel=!c@localhost"]),
        lambda client: client.allow("c", "read", [""]),
        lambda client: client.allow("c", "nonsense", ["bob@localhost"]),
        lambda client: client.join("d", on_behalf="bob@localhost\0"),
        lambda client: client.join("d", on_behalf="bob"),
        lambda client: client.leave("c", on_behalf="bob@nowhere"),
        lambda client: client.allow("c", "read", ["bob"]),
        lambda client: client.disallow("c", "read", ["ann@localhost", "@localhost"]),
        lambda client: client.configure("c", max_clients=1 << 32),
        lambda client: client.configure("c", max_clients=-1),
        lambda client: client.configure("c", type="fifo\nDELETE id=1 channel=!c@localhost"),
    ],
)
async def test_an_argument_that_would_break_the_protocol_is_refused_before_anything_is_sent(
    tmp_path: Path, wrong: Any
) -> None:
    async with serving(tmp_path) as server, await enter(server, "ann") as ann, asyncio.timeout(SECONDS):
        await ann.join("c")
        dialogue = ann._dialogue
        with pytest.raises(OptionsError):
            await wrong(ann)
        assert await ann.members("c") == ["ann@localhost"]
        assert await ann.broadcast("c", b"still here") == 1
        assert ann._dialogue is dialogue


async def test_what_is_too_large_for_the_server_is_refused_and_the_connection_stays(tmp_path: Path) -> None:
    small = {"max_payload_size": 1000, "max_message_size": 1000}
    async with serving(tmp_path, limits=small) as server, await enter(server, "ann") as ann, asyncio.timeout(SECONDS):
        await ann.join("c")
        dialogue = ann._dialogue
        for asked in (
            ann.broadcast("c", b"x" * 1001),
            ann.broadcast_many("c", [b"x", b"x" * 1001]),
            ann.allow("c", "read", [f"member{number}@localhost" for number in range(60)]),
        ):
            with pytest.raises(Refused, match="POLICY_VIOLATION"):
                await asked
        assert await ann.broadcast("c", b"x" * 1000) == 1
        assert ann._dialogue is dialogue


@pytest.mark.parametrize("token", ["", "ann\nAUTH token=bob", "ann\0bob", "\ud800"])
async def test_a_token_that_no_line_can_carry_is_refused_before_it_is_sent(tmp_path: Path, token: str) -> None:
    async with serving(tmp_path) as server, asyncio.timeout(SECONDS):
        with pytest.raises(OptionsError):
            await Client.connect("plain://" + server.addresses["channels-plain"], token=token)


async def test_a_blocking_client_that_was_closed_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, auth=False) as server:
        address = "plain://" + server.addresses["channels-plain"]

        def work() -> None:
            client = BlockingClient(address, username="ann")
            client.join("c")
            client.close()
            client.close()
            with pytest.raises(ClosedError):
                client.members("c")
            assert client.next_news(1.0) is None

        await asyncio.to_thread(work)


class Thinks:
    """A modulator that answers when it is told to."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()
        self.asked = 0

    async def transform(self, _: object, __: object, payload: bytes) -> bytes:
        self.asked += 1
        await self.answer.wait()
        return payload


@pytest.mark.parametrize("runs", [False, True], ids=["one by one", "runs"])
async def test_who_gives_up_waiting_does_not_lose_the_connection_for_asking_too_much(
    runs: bool, tmp_path: Path
) -> None:
    """What a caller gave up is still under way at the server, which ends a connection that has too much there."""
    thinks = Thinks()
    async with (
        asyncio.timeout(SECONDS),
        ChannelServer(tmp_path, options(limits={"max_inflight_requests": 4}), modulator=thinks) as server,
        await enter(server, "ann") as ann,
    ):
        await ann.join("c")
        before = ann._dialogue
        for _ in range(5):
            work = ann.broadcast_many("c", [b"x"] * 4) if runs else ann.broadcast("c", b"x")
            task = asyncio.create_task(work)
            while not thinks.asked:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)  # the others are sent, or wait for their turn
            task.cancel()
            await asyncio.wait([task])
        waits = asyncio.create_task(ann.channels())
        await asyncio.sleep(0.01)
        thinks.answer.set()
        assert await waits == ["!c@localhost"]
        assert ann._dialogue is before


async def test_a_request_that_is_never_answered_does_not_keep_its_place_for_ever(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """The original drops what takes too long without a word."""
    monkeypatch.setattr("penstock.channels.wire.dialogue.ABANDONED_SECONDS", 0.05)
    thinks = Thinks()
    async with (
        asyncio.timeout(SECONDS),
        ChannelServer(tmp_path, options(limits={"max_inflight_requests": 4}), modulator=thinks) as server,
        await enter(server, "ann") as ann,
    ):
        await ann.join("c")
        tasks = [asyncio.create_task(ann.broadcast("c", b"x")) for _ in range(2)]
        tasks.append(asyncio.create_task(ann.broadcast_many("c", [b"x"] * 2)))
        assert ann._dialogue is not None
        while not ann._dialogue._slots.locked():
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert await ann.channels() == ["!c@localhost"]
        assert not ann._dialogue._waiting
        thinks.answer.set()


async def test_a_history_that_was_given_up_is_not_heard_as_news(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, await enter(server, "ann") as ann, await enter(server, "bob") as bob:
        await ann.join("c")
        await ann.configure("c", persist=True)
        await bob.join("c")
        await bob.broadcast_many("c", [b"old"] * 50)
        assert await heard(ann, 50) == [(seq, b"old") for seq in range(1, 51)]
        ann.seen["!c@localhost"] = 40  # as far as it has heard, when the others are on their way
        asking = asyncio.create_task(ann.history("c"))
        assert ann._dialogue is not None
        while not ann._dialogue._history:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        await ann.channels()  # what was asked before it has been answered
        await bob.broadcast("c", b"new")
        assert await heard(ann, 1) == [(51, b"new")]


async def test_histories_that_wait_for_their_turn_are_not_mixed_up(tmp_path: Path) -> None:
    async with serving(tmp_path, limits={"max_inflight_requests": 2}) as server, await enter(server, "ann") as ann:
        for name in ("a", "b"):
            await ann.join(name)
            await ann.configure(name, persist=True)
            await ann.broadcast_many(name, [name.encode()] * 5)
        found = await asyncio.gather(*(ann.history(name) for _ in range(10) for name in ("a", "b")))
    wanted = [[name.encode()] * 5 for _ in range(10) for name in ("a", "b")]
    assert [[message.payload for message in one] for one in found] == wanted
