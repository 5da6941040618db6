"""Promises of WebSocket: binary frames in any cut, the MQTT sub-protocol, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import os
import ssl
from pathlib import Path
from typing import Any

import pytest
import websockets
from mqtt_statements import statement
from net_use import RUNNER_NAMES, RUNNERS, Cores, Noting, eventually, open_raw
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode

from penstock.errors import ProtocolError
from penstock.net import (
    ConnectionOptions,
    Endpoint,
    Target,
    Tls,
    WebSocketOptions,
    dial,
    listen,
    make_development_certificate,
)

pytestmark = pytest.mark.parametrize("runner", RUNNERS, ids=RUNNER_NAMES)


class Echo(Noting):
    def received(self, data: bytes) -> None:
        super().received(data)
        self.connection.write(data)


def endpoint(**options: Any) -> Endpoint:
    return Endpoint(name="ws", websocket=WebSocketOptions(**options))


@statement("6.0.0-1", "6.0.0-2", v3=("6.0.0-1", "6.0.0-2"))
def test_many_packets_come_in_one_frame_and_one_in_many(runner: Any) -> None:
    async def main() -> None:
        async with await listen([endpoint()], cores := Cores(Echo)) as listeners:
            async with connect(f"ws://{listeners.addresses['ws']}/mqtt", subprotocols=["mqtt"]) as socket:  # type: ignore[list-item]
                assert socket.subprotocol == "mqtt"
                await socket.send(b"abc")
                await socket.send([b"d", b"e", b"f"])  # one message in three frames
                long = os.urandom(1 << 20)
                await socket.send(long)
                got = b""
                while len(got) < 6 + len(long):
                    got += await socket.recv(decode=False)
                assert got == b"abcdef" + long
                assert await (await socket.ping()) >= 0
            core = await cores.nth()
            assert core.connection.peer.transport == "ws"
            assert await core.hears("closed") == "the peer closed the connection"

    runner(main())


def test_what_a_turn_produced_is_one_frame(runner: Any) -> None:
    async def main() -> None:
        async with (
            await listen([endpoint()], cores := Cores()) as listeners,
            connect(f"ws://{listeners.addresses['ws']}/", subprotocols=["mqtt"]) as socket,  # type: ignore[list-item]
        ):
            core = await cores.nth()
            core.connection.write(b"one ")
            core.connection.write(b"two")
            assert await socket.recv() == b"one two"

    runner(main())


@statement("6.0.0-1", v3="6.0.0-1")
def test_text_closes_the_connection(runner: Any) -> None:
    async def main() -> None:
        async with await listen([endpoint()], cores := Cores()) as listeners:
            async with connect(f"ws://{listeners.addresses['ws']}/", subprotocols=["mqtt"]) as socket:  # type: ignore[list-item]
                await socket.send("text")
                with pytest.raises(websockets.ConnectionClosed):
                    await socket.recv()
            assert "text frame" in await (await cores.nth()).hears("closed")

    runner(main())


def test_a_frame_beyond_the_limit_closes_the_connection(runner: Any) -> None:
    async def main() -> None:
        async with await listen([endpoint(max_frame_bytes=1000)], cores := Cores()) as listeners:
            async with connect(f"ws://{listeners.addresses['ws']}/", subprotocols=["mqtt"]) as socket:  # type: ignore[list-item]
                await socket.send(bytes(1001))
                with pytest.raises(websockets.ConnectionClosed):
                    await socket.recv()
            await (await cores.nth()).hears("closed")

    runner(main())


@statement("6.0.0-3", "6.0.0-4", v3=("6.0.0-3", "6.0.0-4"))
def test_other_paths_sub_protocols_and_origins_are_refused(runner: Any) -> None:
    async def main() -> None:
        strict = endpoint(path="/mqtt", origins=("https://works.example",))
        async with await listen([strict], cores := Cores()) as listeners:
            address = listeners.addresses["ws"]
            refused: list[dict[str, Any]] = [
                {"uri": f"ws://{address}/other", "subprotocols": ["mqtt"]},
                {"uri": f"ws://{address}/mqtt", "subprotocols": ["chat"]},
                {"uri": f"ws://{address}/mqtt", "subprotocols": ["mqtt"], "origin": "https://evil.example"},
            ]
            for arguments in refused:
                with pytest.raises(websockets.InvalidStatus) as caught:
                    await connect(**arguments)
                assert caught.value.response.status_code in (400, 403, 404)
            assert not cores.made
            async with connect(f"ws://{address}/mqtt?x=1", subprotocols=["mqttv3.1"]) as socket:  # type: ignore[list-item]
                assert socket.subprotocol == "mqttv3.1"
            async with connect(f"ws://{address}/mqtt", origin="https://works.example") as socket:  # type: ignore[arg-type]
                assert socket.subprotocol is None

    runner(main())


@pytest.mark.parametrize("said", [b"\x10\x0c\x00\x04MQTT\r\n\r\n", b"GET / HTTP/1.1\r\n", b"GET /" + b"x" * 20_000])
def test_a_peer_that_speaks_no_websocket_is_dropped(runner: Any, said: bytes) -> None:
    async def main() -> None:
        slow = Endpoint(name="ws", websocket=WebSocketOptions(), options=ConnectionOptions(handshake_seconds=0.3))
        async with await listen([slow], cores := Cores()) as listeners:
            reader, writer = await open_raw(listeners.addresses["ws"])
            writer.write(said)
            try:
                await reader.read()
            except ConnectionResetError:
                pass
            assert not cores.made
            await eventually(lambda: not listeners.connections)
            writer.close()

    runner(main())


def test_our_own_client_speaks_it_over_tls(runner: Any, tmp_path: Path) -> None:
    files = make_development_certificate(str(tmp_path))

    async def main() -> None:
        secure = Endpoint(name="wss", tls=Tls(files), websocket=WebSocketOptions(path="/mqtt"))
        async with await listen([secure], cores := Cores(Echo)) as listeners:
            port = listeners.addresses["wss"].rpartition(":")[2]
            context = ssl.create_default_context(cafile=files.certificate)
            caller = Noting()
            connection = await dial(Target.parse(f"wss://localhost:{port}/mqtt"), caller, tls=context)
            sent = os.urandom(300_000)
            connection.write(sent)
            await caller.gets(sent)
            core = await cores.nth()
            core.connection.close("enough")
            assert await caller.hears("closed") == "the peer closed the connection"
            with pytest.raises(ProtocolError, match="WebSocket handshake"):
                await dial(Target.parse(f"wss://localhost:{port}/other"), Noting(), tls=context)

    runner(main())


def test_many_frames_in_one_read_are_one_batch(runner: Any) -> None:
    async def main() -> None:
        async with (
            await listen([endpoint()], cores := Cores()) as listeners,
            connect(f"ws://{listeners.addresses['ws']}/", subprotocols=["mqtt"]) as socket,  # type: ignore[list-item]
        ):
            core = await cores.nth()
            core.connection.pause_reading()
            for number in range(100):
                await socket.send(b"%02d" % number)
            await asyncio.sleep(0.05)
            core.connection.resume_reading()
            await core.gets(b"".join(b"%02d" % number for number in range(100)))
            assert core.words.count("received") < 100

    runner(main())


REQUEST = (
    b"GET / HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def masked(opcode: Opcode, data: bytes, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


def test_frames_that_come_with_the_request_are_read(runner: Any) -> None:
    async def main() -> None:
        async with await listen([endpoint()], cores := Cores(Echo)) as listeners:
            reader, writer = await open_raw(listeners.addresses["ws"])
            writer.write(REQUEST + masked(Opcode.BINARY, b"early") + masked(Opcode.BINARY, b"bird")[:3])
            core = await cores.nth()
            await core.gets(b"early")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
            assert await reader.readexactly(7) == b"\x82\x05early"
            writer.close()

    runner(main())


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536, 300_000])
def test_a_message_of_any_length_comes_back_as_one_frame(runner: Any, size: int) -> None:
    async def main() -> None:
        async with (
            await listen([endpoint()], cores := Cores()) as listeners,
            connect(f"ws://{listeners.addresses['ws']}/", max_size=None) as socket,
        ):
            core, sent = await cores.nth(), os.urandom(size)
            await socket.send(sent)
            await socket.send(b".")
            await core.gets(sent + b".")
            core.connection.write(sent + b"!")
            assert await socket.recv() == sent + b"!"

    runner(main())


def test_a_ping_between_the_fragments_of_a_message_is_answered(runner: Any) -> None:
    async def main() -> None:
        async with await listen([endpoint()], cores := Cores()) as listeners:
            reader, writer = await open_raw(listeners.addresses["ws"])
            writer.write(REQUEST)
            await reader.readuntil(b"\r\n\r\n")
            stream = (
                masked(Opcode.BINARY, b"ab", fin=False) + masked(Opcode.PING, b"there?") + masked(Opcode.CONT, b"cd")
                + masked(Opcode.BINARY, b"ef")
            )  # fmt: skip
            for at in range(len(stream)):  # whatever the cut
                writer.write(stream[at : at + 1])
                await asyncio.sleep(0)
            core = await cores.nth()
            await core.gets(b"abcdef")
            assert await reader.readexactly(8) == b"\x8a\x06there?"
            writer.close()

    runner(main())


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (Frame(Opcode.BINARY, b"bare").serialize(mask=False), "incorrect masking"),
        (b"\xc2\x80\0\0\0\0", "reserved bits"),
        (b"\x83\x80\0\0\0\0", "invalid opcode"),
        (masked(Opcode.CONT, b"x"), "unexpected continuation"),
        (masked(Opcode.BINARY, b"x", fin=False) + masked(Opcode.BINARY, b"y"), "expected a continuation"),
        (b"\x89\xfe\x00\x7e" + bytes(4 + 126), "control frame too long"),
        (b"\x09\x80\0\0\0\0", "fragmented control frame"),
        (b"\x82\xff" + b"\xff" * 8, "exceeds"),
        (b"\x82\xfe\x03\xe9", "exceeds"),
        (masked(Opcode.BINARY, bytes(900), fin=False) + masked(Opcode.CONT, bytes(101)), "exceeds"),
        (masked(Opcode.TEXT, b"words"), "a text frame"),
        (masked(Opcode.CLOSE, b"\x03"), "close frame too short"),
    ],
    ids=(f"frame{number}" for number in itertools.count()),  # of their own: masks are random
)
def test_a_frame_that_is_wrong_ends_the_connection_with_the_reason(runner: Any, frames: bytes, reason: str) -> None:
    async def main() -> None:
        async with await listen([endpoint(max_frame_bytes=1000)], cores := Cores()) as listeners:
            reader, writer = await open_raw(listeners.addresses["ws"])
            writer.write(REQUEST)
            core = await cores.nth()
            writer.write(masked(Opcode.BINARY, b"good") + frames)
            assert reason in await core.hears("closed")
            writer.close()
            try:
                await reader.read()
            except ConnectionResetError:
                pass

    runner(main())
