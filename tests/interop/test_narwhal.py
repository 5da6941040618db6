"""Our channel client against the original server, the original's benchmark tool against ours, in both auth modes.

The original is not on PyPI: build it (public repository narwhal-io/narwhal, ``cargo build --release``) and say where
with ``PENSTOCK_NARWHAL=target/release``; without it these tests are skipped in one line.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from narwhal_use import BUILT, SECONDS, original
from wire_use import PlainAuthenticator, plain_token

from penstock.channels import ChannelServer, Client, Limits, WireSettings
from penstock.channels.wire import Heard
from penstock.errors import PenstockError, Refused

pytestmark = pytest.mark.skipif(not BUILT, reason="PENSTOCK_NARWHAL does not say where the original was built")


def login(name: str, *, auth: bool) -> dict[str, str]:
    return {"token": plain_token(name)} if auth else {"username": name}


@pytest.mark.parametrize("auth", [False, True], ids=["names", "logins"])
async def test_our_client_uses_the_original_server(tmp_path: Path, auth: bool) -> None:
    async with asyncio.timeout(SECONDS), original(tmp_path, auth=auth) as address:
        async with (
            await Client.connect(address, **login("ann", auth=auth), verify=False) as ann,
            await Client.connect(address, **login("bob", auth=auth), verify=False) as bob,
        ):
            await ann.join("ops")
            await bob.join("ops")
            assert sorted(await ann.members("ops")) == ["ann@localhost", "bob@localhost"]
            numbers = [await ann.broadcast("ops", b"number %d" % n) for n in range(20)]
            heard: list[tuple[int, str, bytes]] = []
            async for message in bob.messages():
                assert isinstance(message, Heard)
                heard.append((message.seq, message.sender, message.payload))
                if len(heard) == len(numbers):
                    break
            assert heard == [(seq, "ann@localhost", b"number %d" % n) for n, seq in enumerate(numbers)]
            many = await ann.broadcast_many("ops", [b"x"] * 300)
            assert len(many) == 300
            await ann.allow("ops", "publish", ["ann@localhost"])
            with pytest.raises(Refused, match="NOT_ALLOWED"):
                await bob.broadcast("ops", b"may I")
            if auth:
                await ann.configure("ops", persist=True, max_persist_messages=100)
                await ann.broadcast("ops", b"kept")
                _, last = await ann.range("ops")
                assert [entry.payload for entry in await ann.history("ops", last)] == [b"kept"]
                await ann.join("jobs")
                await ann.configure("jobs", persist=True, max_persist_messages=100, type="fifo")
                await ann.push("jobs", b"one")
                assert await ann.pop("jobs") == b"one"
                with pytest.raises(Refused, match="QUEUE_EMPTY"):
                    await ann.pop("jobs")
            else:
                with pytest.raises(Refused, match="FORBIDDEN"):
                    await ann.configure("ops", persist=True)
            await bob.leave("ops")
            await ann.delete("ops")
            assert "!ops@localhost" not in await ann.channels()
        with pytest.raises(PenstockError):
            await Client.connect(address, **login("ann", auth=not auth), verify=False, reconnect=False)


@pytest.mark.parametrize("auth", [False, True], ids=["names", "logins"])
async def test_the_tool_of_the_original_drives_our_server(tmp_path: Path, auth: bool) -> None:
    limits = Limits(max_channels=1000, max_clients_per_channel=1000, max_persist_messages=1_000_000)
    server = ChannelServer(
        tmp_path, port=0, limits=limits, wire=WireSettings(rate_limit=0, outbound_message_queue_size=1_000_000),
        modulator=PlainAuthenticator() if auth else None,
    )  # fmt: skip
    async with server:
        command = [os.path.join(BUILT, "narwhal-bench"), "-s", server.addresses["channels"], "-p", "2", "-c", "3"]
        command += ["-d", "2s", "--payload-size", "256"]
        command += ["--auth-password", "s3cret", "--persist", "--flush-interval-ms", "100"] if auth else []
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode == 0, out.decode()


async def test_a_data_directory_goes_from_one_server_to_the_other_and_back(tmp_path: Path) -> None:
    """Each goes on where the other stopped: members, rules, numbers, histories, queues."""

    async def visit(address: str, round_: int, *, tls: bool) -> None:
        place = {"verify": False} if tls else {}
        async with await Client.connect(address, **login("ann", auth=True), **place) as ann:
            if not round_:
                await ann.join("ops/east")
                await ann.configure("ops/east", persist=True, max_persist_messages=1000, message_flush_interval=100)
                await ann.allow("ops/east", "publish", ["ann@localhost", "example.com"])
                await ann.join("jobs")
                await ann.configure("jobs", persist=True, max_persist_messages=1000, type="fifo")
            assert await ann.channels() == ["!jobs@localhost", "!ops/east@localhost"]
            assert await ann.members("ops/east") == ["ann@localhost"]
            assert sorted(await ann.allowed("ops/east", "publish")) == ["ann@localhost", "example.com"]
            assert (await ann.config("ops/east"))["message_flush_interval"] == 100
            for number in range(10):
                assert await ann.broadcast("ops/east", b"%d/%d" % (round_, number)) == 10 * round_ + number + 1
                await ann.push("jobs", b"%d/%d" % (round_, number))
            said = [(one.seq, one.payload) for one in await ann.history("ops/east", 1, 100)]
            assert said == [(10 * r + n + 1, b"%d/%d" % (r, n)) for r in range(round_ + 1) for n in range(10)]
            assert await ann.length("jobs") == 10 + 5 * round_
            first = 5 * round_
            assert [await ann.pop("jobs") for _ in range(5)] == [
                b"%d/%d" % divmod(number, 10) for number in range(first, first + 5)
            ]

    async with asyncio.timeout(SECONDS):
        for round_ in range(5):
            if round_ % 2:
                async with original(tmp_path, auth=True) as address:
                    await visit(address, round_, tls=True)
            else:
                server = ChannelServer(tmp_path / "data", port=None, plain_port=0, modulator=PlainAuthenticator())
                async with server:
                    await visit("plain://" + server.addresses["channels-plain"], round_, tls=False)
