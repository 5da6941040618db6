"""The life of a connection, as far as it can be seen without a server."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from pathlib import Path

import pytest

from penstock.errors import NotConnected, OptionsError, Timeout
from penstock.kv import ConnectionCapabilities, NatsConnection, NatsOptions, nats_connect
from penstock.kv.nats.api import error_of

CREDS = base64.b64encode(b"-----BEGIN NATS USER JWT-----\nx\n").decode()


def test_credentials_are_chosen_by_the_stated_priority() -> None:
    url = "nats://me:s%40crt@localhost:4222"
    every = NatsOptions(url=url, creds=CREDS, creds_file="/run/user.creds").credentials()
    assert list(every) == ["user_credentials"]
    assert "BEGIN NATS USER JWT" in str(every["user_credentials"])
    assert NatsOptions(url=url, creds_file="/run/user.creds").credentials() == {"user_credentials": "/run/user.creds"}
    assert NatsOptions(url=url).credentials() == {"user": "me", "password": "s@crt"}
    assert NatsOptions(url="nats://localhost").credentials() == {}
    with pytest.raises(OptionsError):
        NatsOptions(creds="not base 64!").credentials()


def test_an_address_in_the_place_of_options_is_not_quoted() -> None:
    with pytest.raises(OptionsError, match="not str") as caught:
        NatsConnection("nats://me:s3cret@localhost")  # type: ignore[arg-type]
    assert "s3cret" not in str(caught.value)


def test_printing_the_options_shows_no_secret() -> None:
    options = NatsOptions(url="nats://me:hidden@one:1,nats://me:hidden@two:2", creds=CREDS)
    assert "hidden" not in repr(options)
    assert CREDS not in repr(options)
    assert "me" not in repr(options).replace("name", "")
    assert options.servers()[0] == ["nats://one:1", "nats://two:2"]


@pytest.mark.parametrize("url", ["nats://", "", "nats://[::1"])
def test_an_address_without_a_host_is_refused(url: str) -> None:
    with pytest.raises(OptionsError):
        NatsOptions(url=url).servers()


def test_what_nats_can_do_is_said_before_anyone_connects() -> None:
    assert NatsConnection().capabilities == ConnectionCapabilities(
        streaming_watch=True, prefix_watch=True, ttl=False, purge=True, cas=True, transactions=False,
        max_value_bytes=0, global_ordering=False,
    )  # fmt: skip


async def test_a_failed_dial_is_told_to_everyone_who_waits() -> None:
    connection = NatsConnection(NatsOptions(url="nats://127.0.0.1:1"))
    results = await asyncio.gather(*(connection.connect() for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [NotConnected] * 5
    assert not connection.is_healthy
    with pytest.raises(NotConnected):
        await connection.connect()


async def test_shutdown_gives_up_a_dial_under_way() -> None:
    reached = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = NatsConnection(NatsOptions(url=f"nats://127.0.0.1:{port}"))
    dialling = asyncio.create_task(connection.connect())
    await asyncio.wait_for(reached.wait(), 60)
    await connection.shutdown()
    with pytest.raises(asyncio.CancelledError):
        await dialling
    server.close()


async def half_dead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take everything and answer nothing but PONG."""
    writer.write(b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576,"headers":true}\r\n')
    try:
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
    except ConnectionError:
        pass
    writer.close()


async def test_a_server_that_is_slow_to_answer_is_waited_for() -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2.2)  # the client's own patience ends after two seconds
        await half_dead(reader, writer)

    server = await asyncio.start_server(slow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = NatsConnection(NatsOptions(url=f"nats://127.0.0.1:{port}"))
    await connection.connect()
    assert connection.is_healthy
    await connection.shutdown()
    server.close()


async def test_an_operation_on_a_connection_that_died_half_way_ends_with_timeout() -> None:
    server = await asyncio.start_server(half_dead, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = NatsConnection(NatsOptions(url=f"nats://127.0.0.1:{port}", operation_seconds=60))
    await connection.connect()
    connection._options = dataclasses.replace(connection._options, operation_seconds=0.3)
    with pytest.raises(Timeout):
        await connection.store("b")
    await connection.shutdown()
    server.close()


async def test_a_connect_without_a_server_names_the_address_and_not_the_password() -> None:
    with pytest.raises(NotConnected, match=r"127\.0\.0\.1:1") as caught:
        await nats_connect("nats://me:hidden@127.0.0.1:1")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ({"code": 400, "err_code": 10071, "description": "wrong last sequence: 4"}, "RevisionMismatch"),
        ({"code": 400, "err_code": 10164, "description": "wrong last sequence"}, "RevisionMismatch"),
        ({"code": 404, "err_code": 10059, "description": "stream not found"}, "ReplacedError"),
        ({"code": 503, "err_code": 10077, "description": "maximum bytes exceeded"}, "Backpressure"),
        ({"code": 400, "err_code": 10054, "description": "message size exceeds maximum allowed"}, "OptionsError"),
        ({"code": 503, "err_code": 10008, "description": "temporarily unavailable"}, "NotConnected"),
        ({"code": 500, "description": "what"}, "RetryError"),
        ("text", "RetryError"),
    ],
)
def test_every_error_of_the_server_has_its_place_in_the_tree(error: object, name: str) -> None:
    assert type(error_of(error, "KV_b", "$KV.b.k")).__name__ == name


def test_creds_files_are_left_to_the_client(tmp_path: Path) -> None:
    file = tmp_path / "user.creds"
    assert NatsOptions(creds_file=str(file)).credentials()["user_credentials"] == str(file)
