"""Promise: a client that comes back hears every message once and in order, or is told which it missed for good."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from wire_use import SECONDS, PlainAuthenticator, Raw, address, options, plain_token

from penstock.channels.wire import BlockingClient, ChannelServer, Client, Gap, Heard

C = "channel=!c@localhost"
HELLO = "CONNECT resume=true version=1"


async def serve(root: Path, **more: Any) -> ChannelServer:
    server = ChannelServer(root, options(**{"wire": {"rate_limit": 0}, **more}), modulator=PlainAuthenticator())
    await server.start()
    return server


async def kept(server: ChannelServer, who: str = "ann", **settings: Any) -> Client:
    client = await Client.connect(address(server), token=plain_token(who))
    await client.join("c")
    await client.configure("c", persist=True, **{"message_flush_interval": 100, **settings})
    return client


async def test_an_old_client_never_notices(tmp_path: Path) -> None:
    server = await serve(tmp_path)
    try:
        async with await Raw.open(server) as old:
            assert "resume" not in await old.ask("CONNECT version=1")
            await old.ask(f"AUTH token={plain_token('ann')}")
            assert await old.ask(f"RESUME id=1 {C} from_seq=1") == (
                'ERROR detail=\\"unknown message\\" reason=BAD_REQUEST'
            )
    finally:
        await server.stop()


async def test_what_was_missed_is_replayed_and_then_the_channel_is_live(tmp_path: Path) -> None:
    server = await serve(tmp_path)
    try:
        async with await kept(server) as ann, await Raw.open(server) as bob:
            await bob.login("bob", auth=True)
            await bob.ask(f"JOIN id=1 {C}")
            assert await ann.broadcast_many("c", [b"%d" % n for n in range(1, 6)]) == [1, 2, 3, 4, 5]
            await bob.gone()
            async with await Raw.open(server) as again:
                assert (await again.ask(HELLO)).endswith(" resume=true")
                await again.ask(f"AUTH token={plain_token('bob')}")
                await ann.broadcast("c", b"6")  # between login and RESUME nothing is told
                again.write(f"RESUME id=2 {C} from_seq=3\n")
                assert await again.frames(1) == [f"RESUME_ACK id=2 {C} first_seq=3 last_seq=6 recovered=true"]
                told = await again.frames(4)
                assert [int(frame.split("seq=")[1].split()[0]) for frame in told] == [3, 4, 5, 6]
                await ann.broadcast("c", b"7")
                assert "seq=7 " in (await again.frames(1))[0]
    finally:
        await server.stop()


async def test_what_retention_took_is_told_with_its_numbers(tmp_path: Path) -> None:
    server = await serve(tmp_path, segment_bytes=300)
    try:
        async with await kept(server, max_persist_messages=5) as ann:
            for n in range(20):
                await ann.broadcast("c", b"message %d" % n)
            first, last = await ann.range("c")
            assert first > 1
            async with await Raw.open(server) as bob:
                await bob.ask(HELLO)
                await bob.ask(f"AUTH token={plain_token('ann')}")
                wanted = f"RESUME_ACK id=1 {C} first_seq={first} last_seq={last} recovered=false"
                assert await bob.ask(f"RESUME id=1 {C} from_seq=1") == wanted
    finally:
        await server.stop()


async def test_a_client_hears_every_message_once_over_restarts_and_lost_connections(tmp_path: Path) -> None:
    """Messages are sent all the time while the server restarts and connections are cut: bob's list has no hole."""
    server = await serve(tmp_path, plain_port=0)
    place = address(server)
    port = int(place.rpartition(":")[2])
    heard: list[Heard | Gap] = []
    ann = await kept(server)
    bob = await Client.connect(place, token=plain_token("bob"))
    await bob.join("c")

    async def listen() -> None:
        async for item in bob.news():
            if isinstance(item, (Heard, Gap)):
                heard.append(item)
                if isinstance(item, Heard) and item.payload == b"last":
                    return

    listening = asyncio.create_task(listen())
    acked: list[int] = []
    try:
        for turn in range(6):
            for _ in range(20):
                try:
                    acked.append(await ann.broadcast("c", b"turn %d" % turn))
                except Exception:
                    continue
            if turn % 2:
                for client in list(server.clients):
                    client._connection.abort("cut")
            else:
                await server.stop()
                server = await serve(tmp_path, plain_port=port)
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    acked.append(await ann.broadcast("c", b"last"))
                    break
                except Exception:
                    await asyncio.sleep(0.01)
            await listening
    finally:
        listening.cancel()
        await ann.close()
        await bob.close()
        await server.stop()
    assert not [item for item in heard if isinstance(item, Gap)]
    numbers = [item.seq for item in heard if isinstance(item, Heard)]
    assert numbers == sorted(set(numbers))
    assert set(acked) <= set(numbers)


async def test_programs_without_a_loop_use_the_same_methods(tmp_path: Path) -> None:
    server = await serve(tmp_path)

    def work() -> list[Any]:
        with BlockingClient(address(server), token=plain_token("ann")) as ann:
            ann.join("c")
            ann.configure("c", persist=True, type="fifo")
            ann.push("c", b"job")
            found = [ann.length("c"), ann.pop("c"), ann.members("c"), ann.channels(owner=True), ann.next_news(0.01)]
            with pytest.raises(Exception, match="QUEUE_EMPTY"):
                ann.pop("c")
            return found

    try:
        assert await asyncio.to_thread(work) == [1, b"job", ["ann@localhost"], ["!c@localhost"], None]
    finally:
        await server.stop()


async def test_a_client_that_was_closed_leaves_no_socket() -> None:
    """Promise: ``close`` returns when the connection is gone, not when it was told to go."""
    closing = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Shake hands as a server does, and let the client wait for the end."""
        await reader.readline()
        limits = "heartbeat_interval=60000 max_inflight_requests=5 max_message_size=4096 max_payload_size=4096"
        writer.write(f"CONNECT_ACK auth_required=false {limits} max_subscriptions=5\n".encode())
        await reader.readline()
        writer.write(b"IDENTIFY_ACK nid=ann@localhost\n")
        assert await reader.read() == b""
        closing.set()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(slow, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        client = await Client.connect(f"plain://{host}:{port}", username="ann", reconnect=False)
        assert client._dialogue is not None
        connection = client._dialogue._connection
        await client.close()
        assert closing.is_set()
        assert connection._lost


async def test_replays_that_go_on_are_no_requests_under_way(tmp_path: Path, monkeypatch: Any) -> None:
    """A RESUME is answered when its replay begins: who resumes many channels does not ask too much at a time."""
    monkeypatch.setattr("penstock.channels.wire.resume.PIECE", 5)  # a replay takes its time
    names = [f"c/{number}" for number in range(8)]
    async with (
        asyncio.timeout(SECONDS),
        ChannelServer(
            tmp_path, options(limits={"max_inflight_requests": 2, "rate_limit": 0}), modulator=PlainAuthenticator()
        ) as server,
        await Client.connect(address(server), token=plain_token("bob")) as bob,
    ):
        for name in names:
            await bob.join(name)
            await bob.configure(name, persist=True, message_flush_interval=1000)  # no sync for each
            for _ in range(10):
                await bob.broadcast_many(name, [b"x" * 1000] * 100)
        async with await Raw.open(server) as raw:
            await raw.login("bob", auth=True, hello=HELLO)
            for number, name in enumerate(names, 1):
                raw.write(f"RESUME id={number} channel=!{name}@localhost from_seq=1\n")
                while not (frame := await raw.frame()).startswith(b"RESUME_ACK id=%d " % number):
                    assert frame, f"closed before {number} was answered"


@pytest.mark.parametrize("second", [f"RESUME id=2 {C} from_seq=2", f"LEAVE id=2 {C}"])
async def test_a_resume_that_something_else_overtakes_is_answered(second: str, tmp_path: Path) -> None:
    server = await serve(tmp_path)
    try:
        async with await kept(server, "bob") as bob, await Raw.open(server) as raw:
            await bob.broadcast_many("c", [b"x"] * 3)
            async with await Client.connect(address(server), token=plain_token("ann")) as ann:
                await ann.join("c")
            await raw.login("ann", auth=True, hello=HELLO)
            raw.write(f"RESUME id=1 {C} from_seq=1\n{second}\nCHAN_SEQ id=3 {C}\n")
            answered: list[str] = []
            while "3" not in answered:
                frame = (await raw.frame()).decode()
                assert frame
                answered += [word.removeprefix("id=") for word in frame.split() if word.startswith("id=")]
            raw.write(f"GET_CHAN_CONFIG id=4 {C}\n")
            while "4" not in answered:
                frame = (await raw.frame()).decode()
                answered += [word.removeprefix("id=") for word in frame.split() if word.startswith("id=")]
            assert sorted(answered) == ["1", "2", "3", "4"]
    finally:
        await server.stop()


async def test_a_resume_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    """Or a client could fill the memory of its server with names."""
    server = await serve(tmp_path)
    try:
        async with await kept(server, "bob") as bob, await Raw.open(server) as raw:
            await bob.join("jobs")
            await bob.configure("jobs", persist=True, type="fifo")
            await raw.login("ann", auth=True, hello=HELLO)
            (shell,) = [shell for shell in server.clients if str(shell.link.nid) == "ann@localhost"]
            names = [
                "!c@localhost",
                "!jobs@localhost",
                "!c@far.io",
                *(f"!no/{number}@localhost" for number in range(20)),
            ]
            for number, name in enumerate(names, 1):
                assert f"ERROR id={number} " in await raw.ask(f"RESUME id={number} channel={name} from_seq=1")
            assert not shell.hearing._replays
    finally:
        await server.stop()


@pytest.mark.parametrize("how", ["deleted", "put out"])
async def test_a_replay_of_a_channel_that_is_over_ends_without_another_word(
    how: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """The event says it.  An error without an id is one that ends a connection, and a client takes it for that."""
    monkeypatch.setattr("penstock.channels.wire.resume.PIECE", 1)  # one question after the other
    server = await serve(tmp_path)
    try:
        async with await kept(server) as ann, await Raw.open(server) as bob:
            await ann.broadcast_many("c", [b"x"] * 1000)
            await bob.login("bob", auth=True, hello=HELLO)
            await bob.ask(f"JOIN id=1 {C}")
            bob.write(f"RESUME id=2 {C} from_seq=1\n")
            assert (await bob.frame()).startswith(b"RESUME_ACK id=2 ")
            await (ann.delete("c") if how == "deleted" else ann.leave("c", on_behalf="bob@localhost"))
            while not (frame := await bob.frame()).startswith(b"EVENT "):
                assert frame.startswith(b"MESSAGE "), frame
            assert (await bob.ask("CHANNELS id=3")) == "CHANNELS_ACK id=3"
    finally:
        await server.stop()


async def test_who_may_not_put_itself_out_goes_on_hearing(tmp_path: Path) -> None:
    """Only an owner leaves on behalf of anybody: who was refused is a member as before."""
    server = await serve(tmp_path)
    try:
        async with await kept(server) as ann, await Raw.open(server) as bob:
            await bob.login("bob", auth=True, hello=HELLO)
            await bob.ask(f"JOIN id=1 {C}")
            refused = await bob.ask(f"LEAVE id=2 {C} on_behalf=bob@localhost")
            assert refused == "ERROR id=2 reason=FORBIDDEN"
            await ann.broadcast("c", b"hello")
            assert (await bob.frame()).startswith(b"MESSAGE ")
            await ann.leave("c")  # now it is bob's
            assert [frame.split()[-1] for frame in await bob.frames(2)] == ["owner=true"] * 2
            assert await bob.ask(f"LEAVE id=3 {C} on_behalf=bob@localhost") == "LEAVE_ACK id=3"
            (shell,) = [shell for shell in server.clients if str(shell.link.nid) == "bob@localhost"]
            assert not shell.hearing._replays
    finally:
        await server.stop()


@pytest.mark.parametrize("how", ["joins", "comes back"])
async def test_nothing_is_missed_by_who_joins_while_very_much_is_said(how: str, tmp_path: Path) -> None:
    """What waited for the modulator's word on a join was said in one turn, and the oldest of it never heard."""
    looking, may = asyncio.Event(), asyncio.Event()

    class Looks:
        async def on_event(self, event: Any) -> None:
            if str(event.nid) == "eve@localhost" or (how == "joins" and str(event.nid) == "bob@localhost"):
                looking.set()
                await may.wait()

    async with (
        ChannelServer(tmp_path, options(), modulator=Looks()) as server,
        await Client.connect(address(server), username="ann") as ann,
        await Client.connect(address(server), username="eve") as eve,
        await Raw.open(server) as bob,
        asyncio.timeout(SECONDS),
    ):
        await ann.join("c")
        await bob.login("bob", hello=HELLO)
        (shell,) = [shell for shell in server.clients if str(shell.link.nid) == "bob@localhost"]
        waits = None
        if how == "comes back":
            assert (await bob.ask(f"JOIN id=1 {C}")).startswith("JOIN_ACK")
            waits = asyncio.create_task(eve.join("c"))
        else:
            bob.write(f"JOIN id=1 {C}\n")
        await looking.wait()
        said = server.manager.channel("c")
        runs = [asyncio.create_task(said.broadcast_many("ann@localhost", [b"x"] * 100)) for _ in range(60)]
        await asyncio.sleep(0)  # all of them wait behind the join
        if how == "comes back":
            bob.write(f"RESUME id=2 {C} from_seq=1\n")
            while not shell.busy:
                await asyncio.sleep(0.001)
        may.set()
        await asyncio.gather(*runs)
        found: list[int] = []
        while len(found) < 6000:
            frame = await bob.frame()
            if frame.startswith(b"MESSAGE "):
                found.append(int(frame.partition(b" seq=")[2].split()[0]))
        assert found == list(range(1, 6001))
        if waits is not None:
            await waits
