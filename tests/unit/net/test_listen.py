"""Promises of listeners: who is let in, who is turned away and at what cost, and what is said about it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from net_use import RUNNER_NAMES, RUNNERS, Cores, Noting, eventually, open_raw

from penstock.errors import LockedError, OptionsError
from penstock.net import Admission, ConnectionLimits, ConnectionOptions, Endpoint, Listeners, Target, dial, listen

pytestmark = pytest.mark.parametrize("runner", RUNNERS, ids=RUNNER_NAMES)
PROXY = b"PROXY TCP4 192.0.2.7 192.0.2.1 56010 1883\r\n"


def test_port_0_picks_a_free_one_on_loopback_and_says_so(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with await listen([Endpoint(name="a"), Endpoint(name="b")], Cores()) as listeners:
            first, second = listeners.addresses["a"], listeners.addresses["b"]
            assert first != second
            assert first.startswith("127.0.0.1:")

    with caplog.at_level(logging.INFO, "penstock.net"):
        runner(main())
    assert "this machine only" in caplog.text


def test_an_open_port_without_tls_is_a_warning(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with await listen([Endpoint(name="a", host="0.0.0.0")], Cores()):
            pass

    with caplog.at_level(logging.WARNING, "penstock.net"):
        runner(main())
    assert "open to other machines, without TLS" in caplog.text


def test_a_name_with_two_addresses_has_one_port(runner: Any) -> None:
    async def main() -> None:
        async with await listen([Endpoint(name="a", host="localhost")], Cores()) as listeners:
            port = int(listeners.addresses["a"].rpartition(":")[2])
            for _, _, _, _, place in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM):
                _, writer = await asyncio.open_connection(place[0], place[1])
                writer.close()

    runner(main())


@pytest.mark.parametrize("depth", [0, 5])
def test_a_unix_socket_serves_and_is_gone_afterwards(runner: Any, tmp_path: Path, depth: int) -> None:
    """However deep its folder lies: an address has room for 107 bytes of a path."""
    tmp_path = tmp_path.joinpath(*["a" * 40] * depth)
    tmp_path.mkdir(parents=True, exist_ok=True)

    path = str(tmp_path / "socket")

    async def main() -> None:
        async with await listen([Endpoint(name="a", path=path, mode=0o600)], cores := Cores()) as listeners:
            assert listeners.addresses == {"a": f"unix:{path}"}
            assert os.stat(path).st_mode & 0o777 == 0o600
            caller = Noting()
            connection = await dial(Target.parse(f"unix:{path}"), caller)
            connection.write(b"hello")
            core = await cores.nth()
            await core.gets(b"hello")
            assert core.connection.peer.transport == "unix"
            assert core.connection.peer.address == "unix"
        assert not os.path.exists(path)

    runner(main())


def test_a_stale_socket_file_is_replaced_a_live_one_is_not(runner: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    (tmp_path / "notes").write_text("precious")

    async def main() -> None:
        async with await listen([Endpoint(name="a", path=path)], Cores()):
            with pytest.raises(LockedError, match="another process"):
                await listen([Endpoint(name="b", path=path)], Cores())
            with pytest.raises(OptionsError, match="no socket"):
                await listen([Endpoint(name="b", path=str(tmp_path / "notes"))], Cores())
        assert (tmp_path / "notes").read_text() == "precious"

    runner(main())


def test_all_endpoints_open_or_none(runner: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")

    async def main() -> None:
        async with await listen([Endpoint(name="a")], Cores()) as taken:
            port = int(taken.addresses["a"].rpartition(":")[2])
            with pytest.raises(LockedError, match=str(port)):
                await listen([Endpoint(name="u", path=path), Endpoint(name="b", port=port)], Cores())
            assert not os.path.exists(path)
            with pytest.raises(OptionsError, match="one name"):
                await listen([Endpoint(name="a"), Endpoint(name="a")], Cores())
            with pytest.raises(OptionsError, match="no address"):
                await listen([Endpoint(name="a", host="no such host.invalid")], Cores())

    runner(main())


async def _turned_away(listeners: Listeners, said: bytes = b"") -> None:
    reader, writer = await open_raw(listeners.addresses["test"])
    try:
        assert await reader.read() == said
    except ConnectionResetError:
        assert said == b""
    writer.close()


def test_who_is_beyond_the_limit_is_turned_away_before_a_core_is_made(runner: Any) -> None:
    async def main() -> None:
        admission = Admission(ConnectionLimits(max_connections=2))
        async with await listen([Endpoint(name="test")], cores := Cores(), admission=admission) as listeners:
            writers = []
            for number in range(2):
                writers.append((await open_raw(listeners.addresses["test"]))[1])
                await cores.nth(number)
            for _ in range(20):
                await _turned_away(listeners)
            assert len(cores.made) == 2
            assert admission.refused == 20
            writers[0].close()
            await cores.made[0].hears("closed")
            _, again = await open_raw(listeners.addresses["test"])
            await cores.nth(2)
            for writer in (writers[1], again):
                writer.close()
        assert admission.total == 0

    runner(main())


def test_a_refusal_can_say_why_in_the_words_of_the_protocol(runner: Any) -> None:
    async def main() -> None:
        admission = Admission(ConnectionLimits(max_connections=1))
        endpoint = Endpoint(name="test", refusal=b"ERROR reason=SERVER_OVERLOADED\n")
        async with await listen([endpoint], cores := Cores(), admission=admission) as listeners:
            _, writer = await open_raw(listeners.addresses["test"])
            await cores.nth()
            await _turned_away(listeners, endpoint.refusal)
            writer.close()

    runner(main())


def test_a_flood_of_connects_leaves_nothing_behind(runner: Any) -> None:
    async def main() -> None:
        admission = Admission(ConnectionLimits(connects_per_second_per_address=5))
        async with await listen([Endpoint(name="test")], Cores(), admission=admission) as listeners:
            for _ in range(20):
                pairs = await asyncio.gather(*(open_raw(listeners.addresses["test"]) for _ in range(25)))
                for _, writer in pairs:
                    writer.close()
            await eventually(lambda: not listeners.connections)
            assert admission.refused > 400
            assert admission.total == 0
            assert len(listeners._turns._slots) == 0

    runner(main())


def test_the_proxy_header_names_the_peer_and_counts_for_its_address(runner: Any) -> None:
    async def main() -> None:
        admission = Admission(ConnectionLimits(max_per_address=1))
        async with await listen(
            [Endpoint(name="test", proxy=True)], cores := Cores(), admission=admission
        ) as listeners:
            _, writer = await open_raw(listeners.addresses["test"])
            for byte in PROXY + b"hello":
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
            core = await cores.nth()
            assert core.connection.peer.address == "192.0.2.7:56010"
            await core.gets(b"hello")
            _, second = await open_raw(listeners.addresses["test"])
            second.write(PROXY)
            await eventually(lambda: admission.refused == 1)
            _, third = await open_raw(listeners.addresses["test"])
            third.write(PROXY.replace(b"192.0.2.7", b"192.0.2.8") + b"at once")
            await (await cores.nth(1)).gets(b"at once")
            for each in (writer, second, third):
                each.close()

    runner(main())


def test_who_leaves_the_proxy_header_out_is_dropped(runner: Any) -> None:
    async def main() -> None:
        async with await listen([Endpoint(name="test", proxy=True)], cores := Cores()) as listeners:
            reader, writer = await open_raw(listeners.addresses["test"])
            writer.write(b"\x10\x0c\x00\x04MQTT")
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            assert not cores.made
            writer.close()

    runner(main())


def test_a_slow_handshake_ends_however_busily_the_peer_sends(runner: Any) -> None:
    async def main() -> None:
        endpoint = Endpoint(name="test", proxy=True, options=ConnectionOptions(handshake_seconds=0.5))
        async with await listen([endpoint], cores := Cores()) as listeners:
            reader, writer = await open_raw(listeners.addresses["test"])
            header = iter(PROXY[:-2] + b"1" * 60)
            ended = asyncio.create_task(reader.read())
            while not ended.done():
                writer.write(bytes([next(header)]))
                await asyncio.sleep(0.05)
            assert not cores.made
            await eventually(lambda: not listeners.connections)
            ended.exception()
            writer.close()

    runner(main())


def test_stop_accepting_lets_open_connections_go_on(runner: Any) -> None:
    async def main() -> None:
        async with await listen([Endpoint(name="test")], cores := Cores()) as listeners:
            _, writer = await open_raw(listeners.addresses["test"])
            core = await cores.nth()
            listeners.stop_accepting()
            await asyncio.sleep(0)
            await eventually(lambda: not _accepts(listeners.addresses["test"]))
            writer.write(b"still here")
            await core.gets(b"still here")
            writer.close()

    runner(main())


def _accepts(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as sock:
        return sock.connect_ex((host, int(port))) == 0
