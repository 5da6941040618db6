"""What tests of the channel client share: a server, people who are in it, what they heard, lost connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from wire_use import SECONDS, PlainAuthenticator, options, plain_token

from penstock.channels.wire import ChannelServer, Client, Gap, Heard


@asynccontextmanager
async def serving(root: Path, *, auth: bool = True, **more: Any) -> AsyncIterator[ChannelServer]:
    modulator = PlainAuthenticator() if auth else None
    async with ChannelServer(root, options(**{"wire": {"rate_limit": 0}, **more}), modulator=modulator) as server:
        yield server


async def enter(server: ChannelServer, name: str) -> Client:
    login = {"token": plain_token(name)} if server.authenticates else {"username": name}
    return await Client.connect("plain://" + server.addresses["channels-plain"], **login)


async def heard(client: Client, count: int) -> list[tuple[Any, ...]]:
    """Return the next messages and gaps."""
    found: list[tuple[Any, ...]] = []
    async with asyncio.timeout(SECONDS):
        async for item in client.news():
            if isinstance(item, Heard):
                found.append((item.seq, item.payload))
            elif isinstance(item, Gap):
                found.append((item.first_seq, "to", item.last_seq))
            if len(found) == count:
                break
    return found


async def cut(server: ChannelServer, client: Client) -> None:
    """End the connection of a client, and wait until both have noticed."""
    (shell,) = [shell for shell in server.clients if str(shell.link.nid) == client.nid]
    before = client._dialogue
    shell._connection.abort("cut")
    async with asyncio.timeout(SECONDS):
        while client._dialogue is before or shell in server.clients:
            await asyncio.sleep(0.001)


async def back(client: Client) -> None:
    async with asyncio.timeout(SECONDS):
        await client._up.wait()


@asynccontextmanager
async def pretending(*answers: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """Stand in for a server that answers the first lines so and then says nothing; tell how often it was called."""
    calls: list[int] = []
    done = asyncio.Queue[None]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readline()
            writer.write(answer)
        calls.append(1)
        await reader.read()
        writer.close()
        await writer.wait_closed()
        done.put_nowait(None)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"plain://{host}:{port}", calls
        for _ in calls:
            await done.get()


LIMITS = b"heartbeat_interval=60000 max_inflight_requests=5 max_message_size=4096 max_payload_size=4096"
GREETING = b"CONNECT_ACK auth_required=false " + LIMITS + b" max_subscriptions=5 resume=true\n"
WELCOME = b"IDENTIFY_ACK nid=ann@localhost\n"


@asynccontextmanager
async def answering(*scripts: tuple[bytes, ...]) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """Stand in for a server that answers the lines of its first connection so, then those of the next, then closes.

    The last connection stays open; tell which ones there were.
    """
    writers: list[asyncio.StreamWriter] = []
    ended: list[asyncio.Task[Any] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.current_task())
        script = scripts[min(len(writers), len(scripts) - 1)]
        is_last = len(writers) >= len(scripts) - 1
        writers.append(writer)
        for answer in script:
            await reader.readline()
            writer.write(answer)
        if is_last:
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"plain://{host}:{port}", writers
        await asyncio.wait([task for task in ended if task is not None])


def coming_back() -> int:
    """Return how many times over clients of this loop are connecting again."""
    return sum("_come_back" in repr(task.get_coro()) for task in asyncio.all_tasks() if not task.done())
