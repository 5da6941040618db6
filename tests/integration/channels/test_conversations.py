"""Promise: recorded conversations with the original go the same way with ours, byte for byte, over real sockets.

Timestamps and the ids of PINGs are different each time.  Frames to different connections may cross; who goes away
leaves its channels in any order; and in ``pipelined`` the original answers CHANNELS before the JOIN in front of it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from wire_use import SECONDS, PlainAuthenticator, Raw, options

from penstock.channels import channel_hash
from penstock.channels.wire import ChannelServer
from penstock.testing.packed import read_cases, unpack

VECTORS = Path(__file__).parents[2] / "vectors" / "narwhal-wire"
CASES = {case["name"]: case for case in read_cases(VECTORS / "conversations.jsonl")}
TIMES = re.compile(rb"(timestamp|PING id)=\d+")
LIMIT = re.compile(r"(\w+) = (\d+)")
WITH_MODULATOR = {name for name in CASES if name.startswith("mod_")}  # test_remote_modulator.py


def setup(case: dict[str, Any]) -> tuple[dict[str, Any], object | None]:
    found = case["setup"]
    given: dict[str, Any] = {name: int(value) for name, value in LIMIT.findall(found.get("limits", ""))}
    for name in ("connect_timeout", "authenticate_timeout", "payload_read_timeout", "keep_alive_interval",
                 "min_keep_alive_interval"):  # fmt: skip
        if name in found:
            text = found[name]
            given[name] = float(text[:-2]) / 1000 if text.endswith("ms") else float(text[:-1])
    return given, PlainAuthenticator() if found.get("auth") else None


def masked(frame: bytes) -> bytes:
    return TIMES.sub(rb"\1=#", frame)


class Replay:
    """One conversation, played again."""

    def __init__(self, case: dict[str, Any], root: Path) -> None:
        self.given, self.modulator = setup(case)
        self.name, self.root = case["name"], root
        self.server: ChannelServer | None = None
        self.stopping: asyncio.Task[None] | None = None
        self.raws: dict[str, Raw] = {}
        self.old: list[Raw] = []
        self.read: dict[str, list[bytes]] = defaultdict(list)
        self.pings: dict[bytes, bytes] = {}

    async def connection(self, name: str) -> Raw:
        if self.stopping is not None:
            await self.stopping
            self.server = self.stopping = None
        if self.server is None:
            if (self.name, name) == ("restart", "a3"):  # the remark about it comes later
                (self.root / "data" / channel_hash("jobs") / "cursor.bin").write_bytes(b"\xff" * 16)
            self.server = ChannelServer(self.root / "data", options(wire=self.given), modulator=self.modulator)
            await self.server.start()
        if name not in self.raws:
            self.raws[name] = await Raw.open(self.server)
        return self.raws[name]

    async def says(self, name: str, data: bytes) -> None:
        if not data:
            if name in self.raws:
                await self.goes(self.raws.pop(name))
            return
        raw = await self.connection(name)
        if data.startswith(b"PONG id=") and data.strip() in self.pings:
            data = self.pings[data.strip()]
        raw.write(data)

    async def goes(self, raw: Raw) -> None:
        """Close a connection, and wait until the server is done with it."""
        server = self.server
        assert server is not None
        before = len(server.clients)
        await raw.gone()
        async with asyncio.timeout(SECONDS):
            while (before and len(server.clients) >= before and not raw.reader.at_eof()) or server._tasks:
                await asyncio.sleep(0.001)

    async def made_elsewhere(self) -> None:
        """Make the queue of ``client_auth``, which another connection of that user made."""
        assert self.server is not None
        other = await (await Raw.open(self.server)).login("ann", auth=True)
        assert await other.ask("JOIN id=1 channel=!jobs@localhost") == "JOIN_ACK id=1 channel=!jobs@localhost"
        await other.ask("SET_CHAN_CONFIG id=2 channel=!jobs@localhost persist=true type=fifo")
        self.raws["other"] = other

    async def hears(self, name: str, wanted: bytes, note: str) -> None:
        if b"SHUTTING_DOWN" in wanted and self.stopping is None:
            assert self.server is not None
            self.stopping = asyncio.create_task(self.server.stop())
        if self.name == "pipelined" and wanted.startswith(b"CHANNELS_ACK id=3"):
            return
        if not wanted:
            if "closed" in note and name in self.raws:
                assert await self.raws[name].ended()
            return
        raw = self.raws[name] if self.stopping is not None else await self.connection(name)
        early = self.read[name]
        wanted_masked = masked(wanted)
        for index, frame in enumerate(early):
            if masked(frame) == wanted_masked:
                del early[index]
                return
        frame = await raw.frame()
        while masked(frame) != wanted_masked and self._may_come_early(frame, wanted):
            early.append(frame)
            frame = await raw.frame()
        assert masked(frame) == wanted_masked, f"{name}: {frame!r} instead of {wanted!r}"
        if wanted.startswith(b"PING "):
            self.pings[b"PONG" + wanted[4:].rstrip()] = b"PONG" + frame[4:]

    def _may_come_early(self, frame: bytes, wanted: bytes) -> bool:
        """Whether a frame is one of those whose order is nobody's promise."""
        if self.name == "pipelined" and frame.startswith(b"CHANNELS_ACK id=3"):
            return True
        if self.name.startswith("session"):
            return frame.startswith(b"EVENT ") and wanted.startswith(b"EVENT ")
        return frame.startswith(b"EVENT ") != wanted.startswith(b"EVENT ") and frame.startswith((b"EVENT", b"MESSAGE"))

    async def end(self) -> None:
        for raw in [*self.raws.values(), *self.old]:
            await raw.gone()
        if self.stopping is not None:
            await self.stopping
        elif self.server is not None:
            await self.server.stop()


@pytest.mark.parametrize("name", sorted(CASES.keys() - WITH_MODULATOR))
async def test_a_recorded_conversation_goes_the_same_way(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    replay = Replay(case, tmp_path)
    try:
        for way, conn, data_hex, note in json.loads(unpack(case["frames"])):
            data = bytes.fromhex(data_hex)
            if way == "c>s":
                await replay.says(conn, data)
            elif way == "s>c":
                if name == "client_auth" and b"!jobs@localhost kind=MEMBER_JOINED" in data:
                    await replay.made_elsewhere()
                await replay.hears(conn, data, note)
    finally:
        await replay.end()
