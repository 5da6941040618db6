"""Promise: what one client does, or does not do, harms no other: floods, slow readers, half-open connections."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

from wire_use import SECONDS, Raw, options

from penstock.channels.wire import ChannelServer

C = "channel=!c@localhost"
BIG = "x" * 60_000


async def served(tmp_path: Path, **wire: Any) -> ChannelServer:
    server = ChannelServer(tmp_path / "data", options(wire={"rate_limit": 0, **wire}))
    await server.start()
    return server


async def joined(server: ChannelServer, name: str) -> Raw:
    raw = await (await Raw.open(server)).login(name)
    assert (await raw.ask(f"JOIN id=1 {C}")).startswith("JOIN_ACK")
    return raw


async def test_a_reader_that_does_not_read_is_let_go_and_the_others_hear_everything(tmp_path: Path) -> None:
    server = await served(tmp_path, outbound_message_queue_size=50)
    try:
        ann, slow, bob = await joined(server, "ann"), await joined(server, "slow"), await joined(server, "bob")
        slow.reader._transport.pause_reading()  # type: ignore[attr-defined]
        while len(server.clients) == 3:
            ann.write(f"BROADCAST id=7 {C} length=60000\n{BIG}\n")
            while not (frame := await ann.frame()).startswith(b"BROADCAST_ACK"):
                assert frame.startswith(b"EVENT ")
            while not (frame := await bob.frame()).startswith(b"MESSAGE "):
                assert frame.startswith(b"EVENT ")
        assert {str(client.link.nid) for client in server.clients} == {"ann@localhost", "bob@localhost"}
        assert await bob.frame() == f"EVENT {C} kind=MEMBER_LEFT nid=slow@localhost owner=false\n".encode()
        slow.reader._transport.resume_reading()  # type: ignore[attr-defined]
        for raw in (ann, slow, bob):
            await raw.gone()
    finally:
        await server.stop()


async def test_what_waits_for_a_client_that_catches_up_is_handed_over_in_pieces(tmp_path: Path) -> None:
    """What waits is shared with the others it goes to; handed over at once, it would be a copy for each."""
    server, count = await served(tmp_path), 300
    try:
        ann, slow = await joined(server, "ann"), await joined(server, "slow")
        assert (await ann.frame()).startswith(b"EVENT ")
        slow.reader._transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(count):
            assert (await ann.ask(f"BROADCAST id=7 {C} length=60000\n{BIG}\n")).startswith("BROADCAST_ACK")
        (client,) = [client for client in server.clients if str(client.link.nid) == "slow@localhost"]
        assert client.link.waiting * len(BIG) > 8 << 20
        slow.reader._transport.resume_reading()  # type: ignore[attr-defined]
        most = 0
        for number in range(1, count + 1):
            frame = await slow.frame()
            assert frame.startswith(b"MESSAGE ")
            assert b" seq=%d " % number in frame
            most = max(most, client._connection.buffered)
        assert most < 2 << 20
        for raw in (ann, slow):
            await raw.gone()
    finally:
        await server.stop()


async def test_a_client_that_asks_and_does_not_read_is_not_read_either(tmp_path: Path) -> None:
    """Its own answers never end it: the server waits, and what it asked is answered when it reads again."""
    server = await served(tmp_path, outbound_message_queue_size=5, max_message_size=65_536)
    try:
        async with await joined(server, "ann") as ann:
            names = " ".join(f"{'u' * 200}{n}@localhost" for n in range(90))
            await ann.ask(f"SET_CHAN_ACL id=2 action=add {C} nids:90={names} type=publish")
            ann.reader._transport.pause_reading()  # type: ignore[attr-defined]
            count = 400
            for number in range(count):
                ann.write(f"GET_CHAN_ACL id={number + 10} {C} type=publish\n")
            await asyncio.sleep(0.2)
            ann.reader._transport.resume_reading()  # type: ignore[attr-defined]
            answers = await ann.frames(count)
            assert [int(answer.split("id=")[1].split()[0]) for answer in answers] == list(range(10, count + 10))
    finally:
        await server.stop()


async def test_a_flood_of_one_client_leaves_the_others_answered(tmp_path: Path) -> None:
    server = await served(tmp_path)
    try:
        async with await joined(server, "ann") as ann, await joined(server, "bob") as bob:
            await ann.frame()
            stop = asyncio.Event()

            async def flood() -> None:
                data = b"".join(b"BROADCAST id=7 %s length=100\n%s\n" % (C.encode(), b"y" * 100) for _ in range(50))
                while not stop.is_set():
                    ann.write(data)
                    await ann.writer.drain()
                    await ann.reader.read(1 << 20)

            flooding = asyncio.create_task(flood())
            for number in range(2, 30):
                bob.write(f"CHANNELS id={number}\n")
                async with asyncio.timeout(SECONDS):
                    while not (await bob.frame()).startswith(b"CHANNELS_ACK"):
                        pass
            stop.set()
            await flooding
    finally:
        await server.stop()


async def test_connections_that_never_say_a_word_are_closed_and_leave_nothing_behind(tmp_path: Path) -> None:
    server = await served(tmp_path, connect_timeout=0.2)
    try:
        host, _, port = server.addresses["channels-plain"].rpartition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(20)]
        async with asyncio.timeout(SECONDS):
            while len(server.clients) < 20:
                await asyncio.sleep(0.01)
            while server.clients:
                await asyncio.sleep(0.01)
        for one in silent:
            one.close()
    finally:
        await server.stop()


async def test_a_client_that_goes_in_the_middle_of_a_request_leaves_nothing_behind(tmp_path: Path) -> None:
    gone = asyncio.Event()

    class Slow:
        async def on_event(self, event: Any) -> None:
            await gone.wait()

    server = ChannelServer(tmp_path / "data", options(), modulator=Slow())
    await server.start()
    try:
        raw = await (await Raw.open(server)).login("ann")
        raw.write(f"JOIN id=1 {C}\n")
        async with asyncio.timeout(SECONDS):
            while not any(client.busy for client in server.clients):
                await asyncio.sleep(0.01)
            await raw.gone()
            while server.clients:
                await asyncio.sleep(0.01)
            gone.set()
            while server.manager.handlers() or server._tasks:
                await asyncio.sleep(0.01)
        assert not server.manager.is_connected("ann@localhost")
    finally:
        await server.stop()


async def test_a_login_that_ends_after_the_client_has_gone_connects_nobody(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    class Slow:
        async def authenticate(self, token: str) -> str:
            await go_on.wait()
            return token

    server = ChannelServer(tmp_path / "data", options(), modulator=Slow())
    await server.start()
    try:
        async with await Raw.open(server) as raw:
            await raw.ask("CONNECT version=1")
            raw.write("AUTH token=ann\n")
        async with asyncio.timeout(SECONDS):
            while server.clients:
                await asyncio.sleep(0.01)
            go_on.set()
            while server._tasks:
                await asyncio.sleep(0.01)
        assert not server.manager.is_connected("ann@localhost")
    finally:
        await server.stop()


async def test_what_a_client_sends_while_it_logs_in_is_not_gathered(tmp_path: Path) -> None:
    """Nobody knows yet who it is, and the modulator takes its time: what is not read yet waits in the system."""
    go_on = asyncio.Event()

    class Slow:
        async def authenticate(self, token: str) -> str:
            await go_on.wait()
            return token

    server = ChannelServer(tmp_path / "data", options(wire={"rate_limit": 0}, modulator_timeout=60.0), modulator=Slow())
    await server.start()
    try:
        async with await Raw.open(server) as raw:
            await raw.ask("CONNECT version=1")
            raw.write("AUTH token=ann\n")
            asked = "".join(f"CHANNELS id={number} padding={'x' * 1000}\n" for number in range(1, 20_001))
            raw.write(asked)
            (client,) = server.clients
            async with asyncio.timeout(SECONDS):
                while client._connection._reading:
                    await asyncio.sleep(0.001)
                assert raw.writer.transport.get_write_buffer_size() > len(asked) // 4
                assert len(client.link._items) < 2000
                go_on.set()
                assert await raw.frame() == b"AUTH_ACK nid=ann@localhost succeeded=true\n"
                wanted = b"".join(b"CHANNELS_ACK id=%d\n" % number for number in range(1, 20_001))
                assert await raw.reader.readexactly(len(wanted)) == wanted
    finally:
        await server.stop()
