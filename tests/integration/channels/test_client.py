"""Promise: a client hears all of every channel it is in, however it came there and however often a connection ends."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from client_use import (
    GREETING,
    WELCOME,
    answering,
    back,
    coming_back,
    cut,
    enter,
    heard,
    pretending,
    serving,
)
from wire_use import SECONDS, PlainAuthenticator, Raw, options, plain_token

from penstock.channels.wire import BlockingClient, ChannelServer, Client, HeardEvent
from penstock.channels.wire.dialogue import Dialogue
from penstock.channels.wire.frames import Frame
from penstock.errors import ClosedError, NotConnected, OptionsError, Timeout

C = "channel=!c@localhost"


async def test_a_channel_that_was_made_again_is_heard_from_its_first_message(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, auth=False) as server,
        await enter(server, "ann") as ann,
        await enter(server, "bob") as bob,
    ):
        for turn in (b"first", b"second"):
            await ann.join("c")
            await bob.join("c")
            assert await ann.broadcast_many("c", [turn, turn]) == [1, 2]
            assert await heard(bob, 2) == [(1, turn), (2, turn)]
            await ann.delete("c")
            await bob.channels()  # the event is there
        assert bob.seen == {}


async def test_who_was_let_in_by_the_owner_hears_the_channel(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, await enter(server, "ann") as ann, await enter(server, "bob") as bob:
        await ann.join("c")
        await ann.configure("c", persist=True)
        await ann.broadcast("c", b"before")
        await ann.join("c", on_behalf="bob@localhost")
        await ann.broadcast("c", b"hello")
        assert await heard(bob, 1) == [(2, b"hello")]
        await ann.leave("c", on_behalf="bob@localhost")
        await ann.broadcast("c", b"without bob")
        await ann.join("c", on_behalf="bob@localhost")
        await cut(server, bob)
        await ann.broadcast("c", b"meanwhile")
        assert await heard(bob, 1) == [(4, b"meanwhile")]


async def test_a_second_connection_of_a_user_hears_what_the_first_joined(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as server,
        await enter(server, "bob") as first,
        await enter(server, "bob") as second,
        await enter(server, "ann") as ann,
    ):
        await first.join("c")
        await ann.join("c")
        await ann.broadcast("c", b"hello")
        assert await heard(first, 1) == await heard(second, 1) == [(1, b"hello")]


async def test_nothing_is_missed_between_a_join_and_the_first_message(tmp_path: Path) -> None:
    """Whoever joined and heard nothing yet knows where the channel was, so a lost connection makes no hole."""
    async with serving(tmp_path) as server, await enter(server, "ann") as ann, await enter(server, "bob") as bob:
        await ann.join("c")
        await ann.broadcast("c", b"before")
        await bob.join("c")
        await ann.configure("c", persist=True)
        await cut(server, bob)
        await ann.broadcast_many("c", [b"a", b"b"])
        assert await heard(bob, 2) == [(2, b"a"), (3, b"b")]


async def test_a_transient_channel_stays_joined_over_many_lost_connections(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, auth=False) as server,
        await enter(server, "ann") as ann,
        await enter(server, "bob") as bob,
    ):
        await ann.join("c")
        await bob.join("c")
        for _ in range(3):
            await cut(server, bob)
            await back(bob)
        await ann.broadcast("c", b"hello")
        assert await heard(bob, 1) == [(1, b"hello")]  # nothing was missed, and no gap is told


async def test_a_gap_of_a_transient_channel_is_told_exactly(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, auth=False) as server,
        await enter(server, "ann") as ann,
        await Raw.open(server) as raw,
    ):
        await ann.join("c")
        await ann.broadcast_many("c", [b"x"] * 5)
        bob = Client("plain://" + server.addresses["channels-plain"], username="bob")
        bob.seen["c"] = 2  # it was there before
        await bob.open()
        try:
            await ann.broadcast("c", b"six")
            assert await heard(bob, 2) == [(3, "to", 5), (6, b"six")]
        finally:
            await bob.close()
        await raw.login("eve")


async def test_who_never_was_a_member_hears_from_the_number_it_names(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, await enter(server, "ann") as ann:
        await ann.join("c")
        await ann.configure("c", persist=True)
        await ann.broadcast_many("c", [b"1", b"2", b"3"])
        bob = Client("plain://" + server.addresses["channels-plain"], token=plain_token("bob"))
        bob.seen["c"] = 0
        await bob.open()
        try:
            await ann.broadcast("c", b"4")
            assert await heard(bob, 4) == [(1, b"1"), (2, b"2"), (3, b"3"), (4, b"4")]
        finally:
            await bob.close()


async def test_own_messages_count_as_seen(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, await enter(server, "ann") as ann, await enter(server, "bob") as bob:
        await ann.join("c")
        await ann.configure("c", persist=True)
        await bob.join("c")
        await ann.broadcast_many("c", [b"mine"] * 3)
        await ann.broadcast("c", b"mine")
        assert ann.seen["!c@localhost"] == 4
        await cut(server, ann)
        await bob.broadcast("c", b"yours")
        assert await heard(ann, 1) == [(5, b"yours")]


async def test_own_messages_that_are_replayed_together_are_not_heard() -> None:
    """Sent one by one, they come back in a row: all of one sender and one moment."""
    channel = b"channel=!c@localhost"
    first = (GREETING, WELCOME, b"CHANNELS_ACK id=1\n", b"JOIN_ACK id=2 " + channel + b" last_seq=3\n",
             b"", b"BROADCAST_ACK id=3 seq=5\n", b"", b"BROADCAST_ACK id=4 seq=6\n")  # fmt: skip
    replay = b"RESUME_ACK id=2 " + channel + b" first_seq=4 last_seq=6 recovered=true\n" + b"".join(
        b"MESSAGE %s from=%s@localhost length=1 seq=%d timestamp=%d\nx\n" % (channel, name, seq, time)
        for seq, name, time in ((4, b"bob", 8), (5, b"ann", 9), (6, b"ann", 9), (7, b"bob", 9))
    )  # fmt: skip
    second = (GREETING, WELCOME, b"CHANNELS_ACK id=1 channels:1=!c@localhost\n", replay)
    async with (
        answering(first, second) as (place, _),
        asyncio.timeout(SECONDS),
        await Client.connect(place, username="ann") as ann,
    ):
        await ann.join("c")
        assert [await ann.broadcast("c", b"x") for _ in range(2)] == [5, 6]
        assert await heard(ann, 2) == [(4, b"x"), (7, b"x")]


async def test_numbers_that_began_again_are_told_and_all_is_heard(tmp_path: Path) -> None:
    """The channel was deleted and made again while a client was away: what it knew of is another channel."""
    async with serving(tmp_path) as server, await enter(server, "ann") as ann:
        await ann.join("c")
        await ann.configure("c", persist=True)
        await ann.broadcast_many("c", [b"new", b"new"])
        bob = Client("plain://" + server.addresses["channels-plain"], token=plain_token("bob"))
        bob.seen["c"] = 100
        await bob.open()
        try:
            await ann.broadcast("c", b"newer")
            assert await heard(bob, 4) == [(101, "to", None), (1, b"new"), (2, b"new"), (3, b"newer")]
        finally:
            await bob.close()


async def test_what_was_not_kept_while_persistence_was_off_is_a_gap(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, await enter(server, "ann") as ann, await Raw.open(server) as bob:
        await ann.join("c")
        await ann.configure("c", persist=True)
        await ann.broadcast_many("c", [b"x"] * 5)
        await ann.configure("c", persist=False)
        await ann.broadcast("c", b"six")
        await ann.configure("c", persist=True)
        await bob.ask("CONNECT resume=true version=1")
        await bob.ask(f"AUTH token={plain_token('ann')}")
        resumed = f"RESUME_ACK id=1 {C} first_seq=7 last_seq=6 recovered=false"
        assert await bob.ask(f"RESUME id=1 {C} from_seq=4") == resumed
        await ann.broadcast("c", b"seven")
        assert " seq=7 " in (await bob.frames(1))[0]


async def test_retention_that_overtakes_a_replay_is_told_with_its_numbers(tmp_path: Path) -> None:
    """A client that reads slowly is told of what went while it read, in front of what comes behind."""
    async with (
        serving(tmp_path, segment_bytes=1 << 20, wire={"rate_limit": 0, "max_persist_messages": 4000}) as server,
        await enter(server, "ann") as ann,
    ):
        await ann.join("c")
        await ann.configure("c", persist=True, max_persist_messages=4000, message_flush_interval=1000)
        payload = b"x" * 8000
        await ann.broadcast_many("c", [payload] * 4000)
        async with await Raw.open(server) as bob:
            await bob.ask("CONNECT resume=true version=1")
            await bob.ask(f"AUTH token={plain_token('ann')}")
            resumed = f"RESUME_ACK id=1 {C} first_seq=1 last_seq=4000 recovered=true"
            assert await bob.ask(f"RESUME id=1 {C} from_seq=1") == resumed
            async with asyncio.timeout(
                SECONDS
            ):  # the server has stopped reading the log for a client that does not read
                while not any(shell._slow for shell in server.clients):
                    await asyncio.sleep(0.001)
            await ann.broadcast_many("c", [payload] * 4000)
            last = (await ann.range("c"))[1]
            numbers, gaps, at = [], [], 0
            while at < last:
                frame = await bob.frame()
                assert frame, "closed"
                head = dict(part.split("=") for part in frame.split(b"\n")[0].decode().split()[1:])
                if frame.startswith(b"RESUME_ACK"):
                    assert head["recovered"] == "false"
                    gaps.append((at + 1, int(head["first_seq"]) - 1))
                    at = int(head["first_seq"]) - 1
                else:
                    assert int(head["seq"]) == at + 1, "a hole that nobody told"
                    at += 1
                    numbers.append(at)
            assert gaps
            assert len(numbers) + sum(high - low + 1 for low, high in gaps) == last


async def test_a_server_that_went_without_a_word_is_noticed() -> None:
    """Half-open: the machine of the server is gone and no packet says so."""
    limits = b"heartbeat_interval=20 max_inflight_requests=5 max_message_size=4096 max_payload_size=4096"
    hello = b"CONNECT_ACK auth_required=false " + limits + b" max_subscriptions=5\n"
    async with (
        pretending(hello, b"IDENTIFY_ACK nid=ann@localhost\n") as (place, calls),
        await Client.connect(place, username="ann"),
        asyncio.timeout(SECONDS),
    ):
        while len(calls) < 2:
            await asyncio.sleep(0.01)


FULL = GREETING, WELCOME, b"CHANNELS_ACK id=1\n"


async def test_a_client_that_could_not_be_opened_does_not_go_on_connecting() -> None:
    """Its caller was told so, and knows of no client that could be closed."""
    async with answering((GREETING, WELCOME), FULL) as (place, connections), asyncio.timeout(SECONDS):
        client = Client(place, username="ann")
        with pytest.raises(NotConnected):
            await client.open()
        assert coming_back() == 0
        await client.open()  # it can be tried again
        assert len(connections) == 2
        await client.close()


async def test_a_connection_that_is_lost_while_it_is_made_is_made_again_once() -> None:
    """Two that connect side by side are two connections, and where names are exclusive one is refused for ever."""
    async with answering(FULL, (GREETING, WELCOME), (GREETING,), FULL) as (place, connections):
        async with asyncio.timeout(SECONDS), await Client.connect(place, username="ann") as ann:
            while len(connections) < 4 or ann._dialogue is None:
                assert coming_back() <= 1
                await asyncio.sleep(0.001)
            await back(ann)
            await asyncio.sleep(0)  # who has connected ends
            assert coming_back() == 0
        assert len(connections) == 4


async def test_a_client_comes_back_when_logins_fail_for_a_while(tmp_path: Path) -> None:
    """Whoever judges logins was not there for a moment: that is no reason to give up."""

    class Moody(PlainAuthenticator):
        failures = 0

        def authenticate(self, token: str) -> str | None:
            if self.failures:
                self.failures -= 1
                raise OSError("not now")
            return super().authenticate(token)

    moody = Moody()
    async with (
        ChannelServer(tmp_path, options(modulator_timeout=60.0), modulator=moody) as server,
        await enter(server, "bob") as bob,
        await enter(server, "ann") as ann,
    ):
        await bob.join("c")
        await ann.join("c")
        moody.failures = 2
        await cut(server, bob)
        await back(bob)
        assert moody.failures == 0
        await ann.broadcast("c", b"hello")
        assert await heard(bob, 1) == [(1, b"hello")]


async def test_who_cannot_join_again_is_told(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, auth=False) as server,
        await enter(server, "ann") as ann,
        await enter(server, "bob") as bob,
    ):
        await ann.join("c")
        await bob.join("c")
        await ann.allow("c", "join", ["ann@localhost"])
        await cut(server, bob)
        async with asyncio.timeout(SECONDS):
            async for item in bob.news():
                if isinstance(item, HeardEvent) and item.kind == "MEMBER_LEFT":
                    break
        assert item == HeardEvent("MEMBER_LEFT", "!c@localhost", "bob@localhost", None)
        assert bob.seen == {}
        assert await bob.channels() == []


async def test_who_stops_taking_messages_finds_the_next_one_there(tmp_path: Path) -> None:
    """What came together with the last one taken was gone without a word."""
    async with (
        serving(tmp_path, auth=False) as server,
        await enter(server, "ann") as ann,
        await enter(server, "bob") as bob,
    ):
        await ann.join("c")
        await bob.join("c")
        await ann.broadcast_many("c", [b"%d" % seq for seq in range(1, 10)])
        for seq in range(1, 10):
            async with asyncio.timeout(SECONDS):
                async for message in bob.messages():
                    assert (message.seq, message.payload) == (seq, b"%d" % seq)
                    break


async def test_iterations_that_share_a_client_take_nothing_from_each_other(tmp_path: Path) -> None:
    """What one had left of a run was gone when the other had begun the next run meanwhile."""
    async with (
        serving(tmp_path, auth=False) as server,
        await enter(server, "ann") as ann,
        await enter(server, "bob") as bob,
        asyncio.timeout(SECONDS),
    ):
        await ann.join("c")
        await bob.join("c")
        for _ in range(3):
            await ann.broadcast_many("c", [b"x"] * 3)
        while bob._size < 9:
            await asyncio.sleep(0.001)
        one, other = bob.messages(), bob.messages()
        found = [(await anext(each)).seq for each in (one, other, other, other, one)]
        await other.aclose()
        found += [(await anext(one)).seq]
        await one.aclose()
        found += [(await anext(each)).seq for each in (bob.messages(), bob.messages(), bob.messages())]
        assert found == list(range(1, 10))


async def test_a_client_that_is_closed_while_it_comes_back_says_so_at_once(tmp_path: Path) -> None:
    """Who waited for the connection, and who asked afterwards, waited for the whole of the timeout."""
    async with serving(tmp_path, auth=False) as server:
        ann = await enter(server, "ann")
        await ann.join("c")
    async with asyncio.timeout(SECONDS / 2):
        while ann._again is None:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(ann.broadcast("c", b"x"))
        await asyncio.sleep(0)
        await ann.close()
        for asked in (waiting, ann.members("c"), ann.open()):
            with pytest.raises(ClosedError, match="the client is closed"):
                await asked
    assert not coming_back()


async def test_a_client_that_is_told_nonsense_tries_again() -> None:
    """A login without a name was an AttributeError, after which a client never came back."""
    greeting = GREETING.replace(b"auth_required=false", b"auth_required=true")
    good = (greeting, b"AUTH_ACK succeeded=true nid=ann@localhost\n", b"CHANNELS_ACK id=1\n")
    async with (
        answering(good, (greeting, b"AUTH_ACK succeeded=true\n"), good) as (place, writers),
        await Client.connect(place, token="ann") as ann,
        asyncio.timeout(SECONDS),
    ):
        while len(writers) < 3:
            await asyncio.sleep(0.001)
        await back(ann)


async def test_a_ca_that_cannot_be_read_is_named_and_one_that_is_replaced_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "penstock.channels")
    ca, none = tmp_path / "ca.pem", tmp_path / "none.pem"
    none.write_text("no certificate")
    for path, why in ((ca, "No such file"), (none, "no certificate")):
        with pytest.raises(OptionsError, match=f"{path.name}: {why}"):
            await Client.connect("localhost:1", username="ann", ca=str(path))
    async with ChannelServer(tmp_path / "data", options(port=0)) as server:
        shutil.copy(tmp_path / "data" / "development.pem", ca)
        address = "localhost:" + server.addresses["channels"].rpartition(":")[2]
        async with await Client.connect(address, username="ann", ca=str(ca)) as ann, asyncio.timeout(SECONDS):
            ca.rename(none)
            await cut(server, ann)
            while "ca.pem: No such file" not in caplog.text:
                await asyncio.sleep(0.001)
            none.rename(ca)
            assert await ann.channels() == []


async def test_messages_are_iterated_over_without_a_loop(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, await enter(server, "ann") as ann:
        await ann.join("c")

        def work() -> list[bytes]:
            with BlockingClient("plain://" + server.addresses["channels-plain"], token=plain_token("bob")) as bob:
                bob.join("c")
                loop.call_soon_threadsafe(joined.set)
                messages = bob.messages()
                return [next(messages).payload, next(messages).payload]

        joined, loop = asyncio.Event(), asyncio.get_running_loop()
        working = asyncio.create_task(asyncio.to_thread(work))
        await joined.wait()
        await ann.broadcast_many("c", [b"one", b"two"])
        assert await working == [b"one", b"two"]


async def test_who_only_speaks_is_not_held_up_by_what_it_does_not_take(tmp_path: Path, monkeypatch: Any) -> None:
    """Without anyone who takes its news a client forgets the oldest, and tells so when somebody does."""
    monkeypatch.setattr("penstock.channels.wire.client.INBOX", 100)
    async with (
        serving(tmp_path, auth=False) as server,
        await enter(server, "ann") as ann,
        await enter(server, "bob") as bob,
    ):
        await ann.join("c")
        await bob.join("c")
        for _ in range(5):
            await bob.broadcast_many("c", [b"x"] * 50)
            async with asyncio.timeout(SECONDS):
                assert await ann.channels() == ["!c@localhost"]
        first, *rest = await heard(ann, 101)
        assert first == (1, "to", 150)
        assert [seq for seq, _ in rest] == list(range(151, 251))


async def test_that_nobody_takes_what_is_said_is_logged_once(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Each event that was forgotten was a line of the log: one for everybody who joined or left."""
    monkeypatch.setattr("penstock.channels.wire.client.INBOX", 3)
    async with serving(tmp_path, auth=False) as server, await enter(server, "ann") as ann:
        await ann.join("c")
        for _ in range(5):
            async with await enter(server, "bob") as bob:
                await bob.join("c")
        async with asyncio.timeout(SECONDS):
            while await ann.members("c") != ["ann@localhost"]:
                await asyncio.sleep(0.001)
    assert caplog.text.count("the oldest of it is forgotten") == 1


async def test_who_stops_taking_news_is_told_why_nothing_is_answered(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.channels.wire.client.INBOX", 100)
    async with serving(tmp_path, auth=False) as server, await enter(server, "bob") as bob:
        ann = await Client.connect("plain://" + server.addresses["channels-plain"], username="ann", timeout=0.5)
        await ann.join("c")
        await bob.join("c")
        await bob.broadcast_many("c", [b"x"] * 50)
        assert len(await heard(ann, 1)) == 1
        for _ in range(3):
            await bob.broadcast_many("c", [b"x"] * 50)
        while not ann._held_back:
            await asyncio.sleep(0.001)
        with pytest.raises(Timeout, match=r"\d+ messages wait to be taken"):
            await ann.channels()
        await ann.close()


@pytest.mark.parametrize("auth", [True, False], ids=["kept", "transient"])
async def test_who_is_in_many_channels_does_not_come_back_one_by_one(
    auth: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """A round trip for each would take longer than any time limit where the server is far."""
    under_way: set[object] = set()
    most = 0
    ask = Dialogue.ask

    async def counted(self: Dialogue, name: str, *args: Any, **fields: Any) -> Frame:
        nonlocal most
        one = object()
        under_way.add(one)
        most = max(most, len(under_way))
        try:
            return await ask(self, name, *args, **fields)
        finally:
            under_way.remove(one)

    names = [f"c/{number}" for number in range(40)]
    async with serving(tmp_path, auth=auth) as server, await enter(server, "ann") as ann:
        for name in names:
            await ann.join(name)
            if auth:
                await ann.configure(name, persist=True)
        async with await enter(server, "bob") as bob:
            for name in names:
                await bob.join(name)
            monkeypatch.setattr(Dialogue, "ask", counted)
            await cut(server, ann)
            await back(ann)
            assert most > 10
            for name in names:
                await bob.broadcast(name, name.encode())
            found = set()
            async with asyncio.timeout(SECONDS):
                async for message in ann.messages():
                    found.add((message.channel, message.payload))
                    if len(found) == len(names):
                        break
            assert found == {(f"!{name}@localhost", name.encode()) for name in names}
