"""The node's HTTP answers whoever asks properly, whatever others send or leave unread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from penstock.node import http
from penstock.node.http import HttpAnswer, HttpServer
from penstock.node.options import HttpOptions

ALIVE = b"GET /livez HTTP/1.1\r\nHost: here\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(token: str = "", body: bytes = b"alive\n") -> AsyncIterator[tuple[str, int]]:
    async def say() -> HttpAnswer:
        return HttpAnswer(body)

    server = HttpServer(HttpOptions(port=0, token=token), {"/livez": say, "/api": say})
    await server.start()
    host, _, port = server.addresses["http"].rpartition(":")
    try:
        async with asyncio.timeout(60):
            yield host, int(port)
    finally:
        await server.stop()


async def talk(place: tuple[str, int], sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*place)
    try:
        writer.write(sent)
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (ALIVE, 200),
        (ALIVE * 200, 200),  # one request, one answer
        (b"HEAD /livez HTTP/1.0\r\n\r\n", 200),
        (b"GET http://here/livez HTTP/1.1\r\n\r\n", 200),  # RFC 9112, 3.2.2
        (b"GET /livez?verbose HTTP/1.1\r\n\r\n", 200),
        (b"GET /../livez HTTP/1.1\r\n\r\n", 404),
        (b"GET /%2flivez HTTP/1.1\r\n\r\n", 404),
        (b"GET /\xff\xfe HTTP/1.1\r\nX-\xff: \xfe\r\n\r\n", 404),
        (b"GET /livez HTTP/1.1.1\r\n\r\n", 400),
        (b"GET /livez\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        (b"POST /livez HTTP/1.1\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200_000, 405),
        (b"GET /livez HTTP/1.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n", 431),
        (b"x" * 200_000, 431),
    ],
)
async def test_every_request_has_its_answer(sent: bytes, status: int) -> None:
    async with serving() as place:
        answer = await talk(place, sent)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert (b"\r\nAllow: GET, HEAD\r\n" in answer) is (status == 405)
        if sent.startswith(b"HEAD"):
            assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (b"Authorization: Bearer s\xc3\xa9cret", 200),
        (b"authorization:bearer s\xc3\xa9cret", 200),
        (b"Authorization: Bearer secret", 401),
        (b"Authorization: s\xc3\xa9cret", 401),
        (b"Authorization: Basic s\xc3\xa9cret", 401),
        (b"X: y", 401),
    ],
)
async def test_the_api_asks_for_its_token(given: bytes, status: int) -> None:
    async with serving("sécret") as place:
        answer = await talk(place, b"GET /api HTTP/1.1\r\n" + given + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert (b"\r\nWWW-Authenticate: Bearer\r\n" in answer) is (status == 401)
        assert (await talk(place, ALIVE)).startswith(b"HTTP/1.1 200 ")


async def test_who_says_nothing_keeps_nobody_else_out() -> None:
    said: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    async with serving() as place:
        slow = [await asyncio.open_connection(*place) for _ in range(2 * http.MOST_CONNECTIONS)]
        for _, writer in slow:
            writer.write(b"GET /livez HTT")
        try:
            for _ in range(3):
                assert (await talk(place, ALIVE)).startswith(b"HTTP/1.1 200 ")
            with contextlib.suppress(ConnectionError):
                assert await slow[0][0].read() == b""  # the oldest were let go
        finally:
            for _, writer in slow:
                writer.close()
    assert said == []


async def test_who_reads_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ANSWER_SECONDS", 0.2)
    async with serving(body=bytes(32 << 20)) as place:
        reader, writer = await asyncio.open_connection(*place, limit=1 << 10)
        writer.write(ALIVE)
        assert await reader.readexactly(100)
        while any("HttpServer._serve" in str(task.get_coro()) for task in asyncio.all_tasks()):
            await asyncio.sleep(0.05)
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read()) < 32 << 20
        writer.close()


async def test_a_slow_reader_gets_all_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LINGER_SECONDS", 0.01)
    async with serving(body=bytes(16 << 20)) as place:
        reader, writer = await asyncio.open_connection(*place, limit=1 << 10)
        writer.write(ALIVE)
        seen = 0
        while data := await reader.read(1 << 20):
            seen += len(data)
            if seen % 7 == 0:
                await asyncio.sleep(0.05)
        assert seen > 16 << 20
        writer.close()
