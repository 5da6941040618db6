"""What tests of the channel server share: raw connections, frames one by one, a server on a free port."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from pathlib import Path
from typing import Any, Self

from penstock.channels.model import Limits
from penstock.channels.wire import ChannelServer, ChannelServerOptions, WireSettings

SECONDS = 30.0
"""How long a test waits for what must come."""
PAYLOAD = re.compile(rb"(?:^| )(?:altered_payload_)?length=(\d+)")
WITH_PAYLOAD = (b"MESSAGE ", b"POP_ACK ", b"MOD_DIRECT ", b"S2M_MOD_DIRECT ", b"S2M_FORWARD_BROADCAST_PAYLOAD ")


def plain_token(user: str, password: str = "s3cret") -> str:
    return base64.b64encode(f"\0{user}\0{password}".encode()).decode()


class PlainAuthenticator:
    """The example modulator of the original: any name, one password."""

    protocol = "plain-authenticator/1.0"

    def authenticate(self, token: str) -> str | None:
        try:
            _, user, password = base64.b64decode(token, validate=True).decode().split("\0")
        except ValueError:
            return None
        return user if password == "s3cret" else None


def options(
    *, limits: dict[str, Any] | None = None, wire: dict[str, Any] | None = None, **more: Any
) -> ChannelServerOptions:
    """Return options with the limits of the original, by its names, wherever they belong."""
    given = {**(limits or {}), **(wire or {})}
    kept = {name: given[name] for name in Limits.__struct_fields__ if name in given}
    sent = {name: given[name] for name in WireSettings.__struct_fields__ if name in given}
    assert given.keys() <= kept.keys() | sent.keys(), given
    return ChannelServerOptions(
        **{"port": None, "plain_port": 0, "limits": Limits(**kept), "wire": WireSettings(**sent), **more}
    )


class Raw:
    """A connection that writes bytes and reads frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, server: ChannelServer) -> Raw:
        host, _, port = server.addresses["channels-plain"].rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=1 << 20))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gone()

    def write(self, data: bytes | str) -> None:
        self.writer.write(data.encode() if isinstance(data, str) else data)

    async def frame(self) -> bytes:
        """Return the next frame whole, b"" at the end of the stream."""
        async with asyncio.timeout(SECONDS):
            try:
                line = await self.reader.readline()
                if line.startswith(WITH_PAYLOAD) or b" altered_payload=true" in line:
                    length = PAYLOAD.search(line)
                    assert length is not None
                    return line + await self.reader.readexactly(int(length[1]) + 1)
            except ConnectionError:
                return b""
            return line

    async def ask(self, data: bytes | str) -> str:
        """Write a request and return the next frame, without its line end."""
        self.write(data if data.endswith(b"\n" if isinstance(data, bytes) else "\n") else data + "\n")  # type: ignore[operator,arg-type]
        return (await self.frame()).decode().removesuffix("\n")

    async def frames(self, count: int) -> list[str]:
        return [(await self.frame()).decode().removesuffix("\n") for _ in range(count)]

    async def login(
        self, name: str, *, auth: bool = False, hello: str = "CONNECT heartbeat_interval=60000 version=1"
    ) -> Raw:
        assert (await self.ask(hello)).startswith("CONNECT_ACK ")
        if auth:
            assert await self.ask(f"AUTH token={plain_token(name)}") == f"AUTH_ACK nid={name}@localhost succeeded=true"
        else:
            assert await self.ask(f"IDENTIFY username={name}") == f"IDENTIFY_ACK nid={name}@localhost"
        return self

    async def ended(self) -> bool:
        """Say whether the server closes without another word."""
        return await self.frame() == b""

    def close(self) -> None:
        self.writer.close()

    async def gone(self) -> None:
        """Close and wait until the socket is."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


async def moderated(tmp_path: Path, modulator: object, **more: Any) -> ChannelServer:
    given = options(**{"modulator_timeout": 60.0, **more})  # nothing here is about a slow machine
    server = ChannelServer(tmp_path / "data", given, modulator=modulator)
    await server.start()
    return server


def address(server: ChannelServer) -> str:
    return "plain://" + server.addresses["channels-plain"]
