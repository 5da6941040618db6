"""Promises of a connection: batches in, one write a turn out, bounded, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from net_use import RUNNER_NAMES, RUNNERS, Cores, Noting, eventually, open_raw

from penstock.errors import OptionsError, ProtocolError
from penstock.net import ConnectionOptions, Endpoint, Target, dial, listen

pytestmark = pytest.mark.parametrize("runner", RUNNERS, ids=RUNNER_NAMES)


def endpoint(**options: Any) -> list[Endpoint]:
    return [Endpoint(name="test", options=ConnectionOptions(**options))]


def test_bytes_go_both_ways_and_the_end_is_told_once(runner: Any) -> None:
    async def main() -> None:
        async with await listen(endpoint(), cores := Cores()) as listeners:
            reader, writer = await open_raw(listeners.addresses["test"])
            core = await cores.nth()
            writer.write(b"hello")
            await core.gets(b"hello")
            core.connection.write(b"a")
            core.connection.write_many([b"b", b"c"])
            core.connection.write(memoryview(b"d"))
            assert await reader.readexactly(4) == b"abcd"
            writer.close()
            assert await core.hears("closed") == "the peer closed the connection"
            assert core.words == ["opened", "received", "closed"]
            await eventually(lambda: not listeners.connections)

    runner(main())


def test_a_long_read_is_one_batch_or_few(runner: Any) -> None:
    async def main() -> None:
        async with await listen(endpoint(), cores := Cores()) as listeners:
            _, writer = await open_raw(listeners.addresses["test"])
            core = await cores.nth()
            core.connection.pause_reading()
            sent = bytes(range(256)) * 4096  # 1 MiB
            writer.write(sent)
            await asyncio.sleep(0)
            core.connection.resume_reading()
            await core.gets(sent)
            writer.close()

    runner(main())


def write_calls() -> int:
    """Return how often this process has called the operating system to write or send."""
    if not Path("/proc/self/io").exists():
        pytest.skip("only Linux counts the writes of a process")
    return int(re.search(r"syscw: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]


def test_what_a_turn_produced_leaves_in_one_write(runner: Any) -> None:
    async def main() -> None:
        async with await listen(endpoint(), cores := Cores()) as listeners:
            reader, writer = await open_raw(listeners.addresses["test"])
            core = await cores.nth()
            sends = []
            if runner is asyncio.run:  # its sockets use send, which Linux does not count
                sock = core.connection._transport._sock

                class Watched:
                    def __getattr__(self, name: str) -> Any:
                        return getattr(sock, name)

                    def send(self, data: bytes) -> int:
                        sends.append(len(data))
                        return int(sock.send(data))

                core.connection._transport._sock = Watched()
            before = write_calls()
            for number in range(100):
                core.connection.write(b"%02d" % number)
            assert write_calls() == before
            assert sends == []
            assert len(await reader.readexactly(200)) == 200
            assert len(sends) <= 1
            assert write_calls() <= before + 5  # the loop may have woken itself
            writer.close()

    runner(main())


def test_a_peer_that_does_not_read_is_told_to_the_core_and_again_when_it_does(runner: Any) -> None:
    async def main() -> None:
        options = {"high_water_bytes": 64 << 10, "low_water_bytes": 16 << 10}
        async with await listen(endpoint(**options), cores := Cores()) as listeners:
            reader, writer = await open_raw(listeners.addresses["test"])
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            core = await cores.nth()
            written = 0
            while "congested" not in core.words:
                core.connection.write(bytes(32 << 10))
                written += 32 << 10
                await asyncio.sleep(0)
            assert core.connection.buffered > 64 << 10
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len(await reader.readexactly(written)) == written
            await core.hears("writable")
            await eventually(lambda: core.connection.buffered == 0)
            writer.close()

    runner(main())


def test_output_is_bounded_even_if_the_core_ignores_it(runner: Any) -> None:
    async def main() -> None:
        options = {"high_water_bytes": 64 << 10, "low_water_bytes": 1024, "max_buffered_bytes": 1 << 20}
        async with await listen(endpoint(**options), cores := Cores()) as listeners:
            _, writer = await open_raw(listeners.addresses["test"])
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            core = await cores.nth()
            while "closed" not in core.words:
                core.connection.write(bytes(256 << 10))
                assert core.connection.buffered < 8 << 20
                await asyncio.sleep(0)
            assert "does not read" in await core.hears("closed")
            writer.close()

    runner(main())


def test_a_turn_that_writes_more_than_the_high_water_mark_is_flushed_before_it_ends(runner: Any) -> None:
    async def main() -> None:
        options = {"high_water_bytes": 64 << 10, "low_water_bytes": 1024, "max_buffered_bytes": 64 << 20}
        async with await listen(endpoint(**options), cores := Cores()) as listeners:
            reader, writer = await open_raw(listeners.addresses["test"])
            core = await cores.nth()
            for _ in range(64):
                core.connection.write(bytes(16 << 10))
            assert core.connection._pending <= 80 << 10
            assert len(await reader.readexactly(1 << 20)) == 1 << 20
            writer.close()

    runner(main())


def test_close_sends_what_was_written_even_to_a_peer_that_still_sends(runner: Any) -> None:
    async def main() -> None:
        class Refusing(Noting):
            def received(self, data: bytes) -> None:
                super().received(data)
                self.connection.write(b"no")
                self.connection.close("refused")
                self.connection.write(b"never sent")

        async with await listen(endpoint(), cores := Cores(Refusing)) as listeners:
            host, port = listeners.addresses["test"].split(":")
            loop = asyncio.get_running_loop()
            with socket.create_connection((host, int(port))) as sock:
                sock.setblocking(False)
                await loop.sock_sendall(sock, b"x")
                core = await cores.nth()
                await core.hears("received")
                await loop.sock_sendall(sock, bytes(100_000))  # unread: a plain close would throw the answer away
                got = b""
                while piece := await loop.sock_recv(sock, 100):
                    got += piece
                assert got == b"no"
            assert await core.hears("closed") == "refused"
            assert core.words.count("received") == 1

    runner(main())


def test_a_peer_that_never_closes_is_dropped_after_the_linger_time(runner: Any) -> None:
    async def main() -> None:
        async with await listen(endpoint(linger_seconds=0.2), cores := Cores()) as listeners:
            reader, writer = await open_raw(listeners.addresses["test"])
            core = await cores.nth()
            core.connection.close("enough")
            assert await core.hears("closed") == "enough"
            assert await reader.read() == b""
            writer.close()

    runner(main())


def test_a_half_open_peer_that_takes_nothing_cannot_hold_its_buffers(runner: Any) -> None:
    async def main() -> None:
        options = {"linger_seconds": 0.2, "high_water_bytes": 4 << 20}
        async with await listen(endpoint(**options), cores := Cores()) as listeners:
            _, writer = await open_raw(listeners.addresses["test"])
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            core = await cores.nth()
            core.connection.write(bytes(64 << 20))
            core.connection.close("enough")
            assert await core.hears("closed") == "enough"
            writer.close()

    runner(main())


def test_a_peer_that_shuts_its_half_down_still_gets_the_answers(runner: Any) -> None:
    async def main() -> None:
        class Echo(Noting):
            def received(self, data: bytes) -> None:
                self.connection.write(data)

        async with await listen(endpoint(), Cores(Echo)) as listeners:
            reader, writer = await open_raw(listeners.addresses["test"])
            writer.write(b"question")
            writer.write_eof()
            assert await reader.read() == b"question"
            writer.close()

    runner(main())


def test_abort_drops_what_was_not_sent_and_gives_the_reason(runner: Any) -> None:
    async def main() -> None:
        async with await listen(endpoint(), cores := Cores()) as listeners:
            reader, writer = await open_raw(listeners.addresses["test"])
            core = await cores.nth()
            core.connection.write(b"never sent")
            core.connection.abort("malformed")
            core.connection.abort("second reason")
            assert await core.hears("closed") == "malformed"
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            writer.close()

    runner(main())


def test_a_deadline_counts_from_the_last_read(runner: Any) -> None:
    async def main() -> None:
        silences: list[float] = []

        class Timed(Noting):
            def expired(self) -> None:
                silences.append(asyncio.get_running_loop().time() - self.connection._last_read)
                super().expired()

        async with await listen(endpoint(), cores := Cores(Timed)) as listeners:
            _, writer = await open_raw(listeners.addresses["test"])
            core = await cores.nth()
            core.connection.set_deadline(0.3)
            for _ in range(5):
                writer.write(b".")
                await asyncio.sleep(0.1)
            await core.hears("expired")
            assert silences[0] >= 0.3
            core.connection.set_deadline(None)
            writer.close()

    runner(main())


def test_no_read_moves_an_absolute_deadline(runner: Any) -> None:
    async def main() -> None:
        async with await listen(endpoint(), cores := Cores()) as listeners:
            _, writer = await open_raw(listeners.addresses["test"])
            core = await cores.nth()
            core.connection.set_deadline(0.5, absolute=True)
            while "expired" not in core.words:
                writer.write(b".")
                await asyncio.sleep(0.01)
            writer.close()

    runner(main())


def test_a_deadline_can_be_taken_back_and_shortened(runner: Any) -> None:
    async def main() -> None:
        async with await listen(endpoint(), cores := Cores()) as listeners:
            _, writer = await open_raw(listeners.addresses["test"])
            core = await cores.nth()
            core.connection.set_deadline(0.2)
            core.connection.set_deadline(None)
            await asyncio.sleep(0.5)
            assert "expired" not in core.words
            core.connection.set_deadline(3600)
            core.connection.set_deadline(0.2)
            await core.hears("expired")
            writer.close()

    runner(main())


@pytest.mark.parametrize("word", ["opened", "received", "congested", "expired"])
def test_a_core_that_fails_loses_its_own_connection_only(
    runner: Any, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        class Failed(Noting):
            def opened(self, connection: Any) -> None:
                super().opened(connection)
                self._fail("opened")

            def received(self, data: bytes) -> None:
                self._fail("received")

            def congested(self) -> None:
                self._fail("congested")

            def expired(self) -> None:
                self._fail("expired")

            def _fail(self, at: str) -> None:
                if at == word and self is cores.made[0]:
                    raise RuntimeError("a mistake")

        cores = Cores(Failed)
        async with await listen(endpoint(high_water_bytes=1 << 20, low_water_bytes=1), cores) as listeners:
            _, first = await open_raw(listeners.addresses["test"])
            victim = await cores.nth(0)
            _, second = await open_raw(listeners.addresses["test"])
            other = await cores.nth(1)
            if word == "received":
                first.write(b"x")
            elif word == "congested":
                first.transport.pause_reading()  # type: ignore[attr-defined]
                victim.connection.write(bytes(64 << 20))
            elif word == "expired":
                victim.connection.set_deadline(0.1)
            assert "a mistake" in await victim.hears("closed")
            assert not other.connection.is_closing
            first.close()
            second.close()

    with caplog.at_level(logging.ERROR):
        runner(main())
    assert "a mistake" in caplog.text


def test_a_protocol_error_is_the_reason_and_no_alarm(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        class Strict(Noting):
            def received(self, data: bytes) -> None:
                raise ProtocolError(self.connection.peer.address, "CONNECT", "level 9")

        async with await listen(endpoint(), cores := Cores(Strict)) as listeners:
            _, writer = await open_raw(listeners.addresses["test"])
            writer.write(b"x")
            core = await cores.nth()
            assert "in CONNECT: level 9" in await core.hears("closed")
            writer.close()

    with caplog.at_level(logging.ERROR):
        runner(main())
    assert not caplog.records


def test_close_of_the_listeners_ends_connections_after_what_was_written(runner: Any) -> None:
    async def main() -> None:
        listeners = await listen(endpoint(linger_seconds=0.2), cores := Cores())
        reader, writer = await open_raw(listeners.addresses["test"])
        core = await cores.nth()
        core.connection.write(b"bye")
        await listeners.close("the server stops")
        assert await reader.read() == b"bye"
        assert await core.hears("closed") == "the server stops"
        assert not listeners.connections
        writer.close()

    runner(main())


def test_dialling_nobody_and_a_wrong_address_is_told(runner: Any) -> None:
    from penstock.errors import NotConnected

    async def main() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with pytest.raises(NotConnected, match=str(port)):
            await dial(Target(host="127.0.0.1", port=port), Noting())
        with pytest.raises(OptionsError, match="port"):
            Target.parse("mqtt://host:99999")
        with pytest.raises(OptionsError, match="gopher"):
            Target.parse("gopher://host")
        for text in ("mqtt://[::1", "mqtt://[x]:1", "unix:", "unix://"):
            with pytest.raises(OptionsError, match=re.escape(text)):
                Target.parse(text)

    runner(main())


def test_a_lone_read_writes_at_once_and_a_crowd_is_gathered(runner: Any) -> None:
    async def main() -> None:
        cores = Cores()
        async with await listen(endpoint(), cores) as listeners:
            _, writer = await open_raw(listeners.addresses["test"])
            core = await cores.nth()
            turns = core.connection._turns
            flushed: list[float] = []

            class Other:
                due = None

                def late(self) -> None: ...

                def flush(self) -> None:
                    flushed.append(turns.read_at)

            other, now = Other(), turns.read_at + 1000.0
            turns.time = lambda: now
            core.received = lambda data: turns.flush_later(other)
            core.connection._receive = core.received
            core.connection.data_received(b"first of its millisecond")
            assert flushed == [now]
            core.connection.data_received(b"second")
            core.connection.data_received(b"third")
            assert flushed == [now]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(flushed) == 3
            writer.close()

    runner(main())
