"""Producers hand records to the one writer: nothing is lost or doubled, whatever is cut or refused on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from penstock.disk.failpoint import arm
from penstock.errors import ClosedError, LockedError, NotConnected, OptionsError, ProtocolError, ReplacedError, Timeout
from penstock.log import open_log
from penstock.log.detect import open_writer
from penstock.log.messagelog import MessageLog
from penstock.node.config import check_config
from penstock.node.ingest import IngestPart, IngestWriter, memory as memory_module, wire
from penstock.node.ingest.memory import Announced, IngestMemory, IngestTotals
from penstock.node.options import NodeConfig

T = TypeVar("T")


@asynccontextmanager
async def serving(config: NodeConfig) -> AsyncIterator[IngestPart]:
    part = IngestPart(config)
    await part.start()
    try:
        yield part
    finally:
        await part.drain(5.0)
        await part.stop()


def config_for(folder: Path, more: str = "") -> NodeConfig:
    found, mistakes = check_config(f'data = "{folder}/d"\n{more}', {})
    assert found is not None, mistakes
    return found


async def off(call: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, call)


def payloads(config: NodeConfig, channel: str = "readings") -> list[bytes]:
    options = config.channel_of(channel)
    assert options is not None
    with open_log(options.path(config.data)) as log:
        found: list[bytes] = []
        at = log.first_position
        while len(batch := log.read(at)):
            found += batch.to_payloads()
            at = batch.next_position
        return found


@pytest.mark.parametrize("format", ["messagelog", "xchannel"])
def test_a_writer_of_a_node_is_used_like_the_writer_of_a_log(tmp_path: Path, format: str) -> None:
    config = config_for(tmp_path, f'[[channel]]\nname = "readings"\nformat = "{format}"\n')

    async def run() -> None:
        async with serving(config):

            def work() -> None:
                with IngestWriter(config.data, "readings") as writer:
                    first = writer.append(b"one", timestamp_ns=5_000_000)
                    rest = writer.append_many([b"two", b"three"])
                    assert np.all(np.diff([first, *rest]) > 0)
                    writer.send([b"%d" % n for n in range(100_000)])
                    assert writer.sync() > int(rest[-1])
                    assert writer.last_sequence == 100_003
                    for payload in (5, [1, 2], "on", None):  # bytes(5) would be five zeros
                        with pytest.raises(TypeError):
                            writer.append(payload)
                    with pytest.raises(TypeError):
                        writer.append_many(b"abc")

            await off(work)

    asyncio.run(run())
    found = payloads(config)
    assert found[:3] == [b"one", b"two", b"three"]
    assert found[3:] == [b"%d" % n for n in range(100_000)]


def test_several_producers_share_a_channel_in_their_own_order(tmp_path: Path) -> None:
    config = config_for(tmp_path, "[ingest]\nport = 0\n")

    async def run() -> None:
        async with serving(config) as part:
            places = [config.data, part.addresses["ingest-tcp"]]

            def work(number: int) -> None:
                with IngestWriter(places[number % 2], "readings") as writer:
                    for n in range(50):
                        writer.append_many([b"%d %d" % (number, 10 * n + k) for k in range(10)])

            await asyncio.gather(*(off(lambda number=number: work(number)) for number in range(4)))  # type: ignore[misc]

    asyncio.run(run())
    found = [one.split() for one in payloads(config)]
    assert len(found) == 2000
    for number in range(4):
        assert [int(n) for who, n in found if int(who) == number] == list(range(500))


def test_a_producer_survives_a_restart_of_the_node_without_loss_or_doubles(tmp_path: Path) -> None:
    """The log fails between announcement and acknowledgement, again and again; the node is restarted meanwhile."""
    config = config_for(tmp_path)
    turns = 0

    def trouble() -> None:
        nonlocal turns
        turns += 1
        if turns % 3 == 0:
            raise OSError(28, "No space left on device")

    async def run() -> None:
        done = threading.Event()

        def work() -> None:
            with IngestWriter(config.data, "readings", writer="pump-7", timeout=60) as writer:
                for n in range(60):
                    writer.send([b"%d" % (5 * n + k) for k in range(5)])
                    if n % 7 == 0:
                        writer.flush()
            done.set()

        task = asyncio.ensure_future(off(work))
        with arm("ingest.announced", trouble), arm("ingest.appended", trouble):
            while not done.is_set():
                async with serving(config):
                    for _ in range(20):
                        await asyncio.sleep(0.02)
                        if done.is_set():
                            break
        await task

    asyncio.run(run())
    assert payloads(config) == [b"%d" % n for n in range(300)]
    assert turns > 10


def test_a_producer_that_comes_back_under_its_name_goes_on_where_the_log_is(tmp_path: Path) -> None:
    config = config_for(tmp_path)

    async def run() -> None:
        async with serving(config):

            def work() -> None:
                with IngestWriter(config.data, "readings", writer="pump-7") as writer:
                    writer.append_many([b"a", b"b"])
                with IngestWriter(config.data, "readings", writer="pump-7") as writer:
                    assert writer.last_sequence == 2
                    writer.append(b"c")
                    with (
                        pytest.raises(LockedError, match="another process writes as pump-7"),
                        IngestWriter(config.data, "readings", writer="pump-7") as other,
                    ):
                        other.append(b"d")

            await off(work)

    asyncio.run(run())
    assert payloads(config) == [b"a", b"b", b"c"]


def test_what_is_refused_is_said_and_what_can_wait_waits(tmp_path: Path) -> None:
    config = config_for(
        tmp_path, '[ingest]\nany_channel = false\n[[channel]]\nname = "readings"\nmax_payload_bytes = 100\n'
    )

    async def run() -> None:
        async with serving(config) as part:

            def refused() -> None:
                with IngestWriter(config.data, "readings") as writer:
                    with pytest.raises(OptionsError, match="a record of 101 bytes"):
                        writer.append(bytes(101))
                    writer.append(b"fine")
                with pytest.raises(OptionsError, match="no such channel"):
                    IngestWriter(config.data, "other").append(b"x")

            await off(refused)
            part.refusal = "the disk is full"

            def kept_out() -> None:
                with pytest.raises(NotConnected, match=r"the node takes nothing \(the disk is full"):
                    IngestWriter(config.data, "readings", timeout=0.2).append(b"x")

            await off(kept_out)

            def later() -> int:
                with IngestWriter(config.data, "readings") as writer:
                    return writer.append(b"later")

            waiting = asyncio.ensure_future(off(later))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            part.refusal = ""
            assert await waiting == 2

    asyncio.run(run())
    assert payloads(config) == [b"fine", b"later"]


@pytest.mark.parametrize(
    ("format", "given", "words"),
    [
        ("messagelog", {"kind": 3}, "keeps no kinds"),
        ("messagelog", {"timestamp_ns": -1}, "timestamp_ns=-1"),
        ("xchannel", {"kind": 1 << 16}, "kind=65536"),
        ("xchannel", {"kind": -1}, "kind=-1"),
        ("xchannel", {"timestamp_ns": -1}, "timestamp_ns=-1"),
        ("xchannel", {"timestamp_ns": 1 << 63}, "timestamp_ns=9223372036854775808"),
        ("xchannel", {"kind": 1 << 70}, "kind=1180591620717411303424"),
        ("xchannel", {"payload": bytes(2 << 20)}, "a record of 2097152 bytes"),
        ("xchannel", {"timestamp_ns": 1795124686.5}, "timestamp_ns: must be whole numbers"),
        ("messagelog", {"payload": bytes(wire.MAX_FRAME_BYTES)}, "readings: a record of 67108864 bytes; at most"),
    ],
)
def test_what_the_log_would_refuse_is_refused_to_its_producer_and_to_nobody_else(
    tmp_path: Path, format: str, given: dict[str, Any], words: str
) -> None:
    channel = f'[[channel]]\nname = "readings"\nformat = "{format}"\nmax_payload_bytes = 4194304\n'
    config = config_for(tmp_path, channel)

    async def run() -> None:
        async with serving(config) as part:

            def work() -> None:
                wrong = {"payload": b"x", **given}
                with IngestWriter(config.data, "readings") as other, IngestWriter(config.data, "readings") as writer:
                    other.append(b"first")
                    (channel,) = part.channels.values()
                    with pytest.raises((OptionsError, TypeError), match=words):
                        writer.append(wrong.pop("payload"), **wrong)
                    other.append(b"second")
                    assert list(part.channels.values()) == [channel]  # it was not closed for it
                    writer.append(b"third")

            await off(work)

    asyncio.run(run())
    assert payloads(config) == [b"first", b"second", b"third"]


def test_what_a_timeout_or_an_interrupt_cut_off_is_handed_over_whole(tmp_path: Path) -> None:
    """The half of a batch that had gone took the next batch for its rest: records that nobody wrote, acknowledged."""
    config = config_for(tmp_path)
    records = [bytes([n]) * (1 << 20) for n in range(6)]

    async def run() -> None:
        async with serving(config):
            loop = asyncio.get_running_loop()

            def work() -> None:
                stands, goes_on = threading.Event(), threading.Event()
                with IngestWriter(config.data, "readings", timeout=0.2) as writer:
                    writer.append(b"first")
                    loop.call_soon_threadsafe(lambda: (stands.set(), goes_on.wait()))
                    stands.wait()  # the node takes nothing, and the buffers hold less than this
                    with pytest.raises(Timeout):
                        writer.send(records)
                    writer.timeout = 60.0
                    goes_on.set()
                    writer.send([b"next"])
                    writer.flush()

            await off(work)

    asyncio.run(run())
    assert payloads(config) == [b"first", *records, b"next"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_writer_of_a_node_ends_with_a_fork_and_says_so(tmp_path: Path) -> None:
    """A child had its parent's connection and numbers: one of two records under a number was taken for the other."""
    config = config_for(tmp_path)
    told = b""

    async def run() -> None:
        async with serving(config):

            def work() -> None:
                nonlocal told
                with IngestWriter(config.data, "readings") as writer:
                    writer.append(b"one")
                    reads, writes = os.pipe()
                    child = os.fork()
                    if not child:
                        try:
                            signal.alarm(60)
                            with writer:
                                writer.append(b"of the child")
                            os.write(writes, b"appended")
                        except ClosedError as exc:
                            os.write(writes, str(exc).encode())
                        finally:
                            os._exit(0)
                    os.close(writes)
                    with open(reads, "rb") as found:
                        told = found.read()
                    os.waitpid(child, 0)
                    assert writer.append(b"two") > 0  # the parent's goes on

            await off(work)

    asyncio.run(run())
    assert told == b"readings: the ingest writer was opened before a fork: open another one in the child"
    assert payloads(config) == [b"one", b"two"]


def test_bytes_that_are_no_frames_end_the_connection_with_a_reason(tmp_path: Path) -> None:
    config = config_for(tmp_path)

    async def run() -> None:
        async with serving(config) as part:

            def work(data: bytes) -> bytes:
                with socket.socket(socket.AF_UNIX) as door:
                    door.settimeout(20)
                    door.connect(part.addresses["ingest"].removeprefix("unix:"))
                    door.sendall(data)
                    answer = b""
                    while piece := door.recv(4096):
                        answer += piece
                    return answer

            for data in (b"\xff" * 64, wire.frame(wire.BATCH, b"x"), wire.frame(wire.HELLO, b"\xc1")):
                assert b"ProtocolError" in await off(lambda data=data: work(data))  # type: ignore[misc]

    asyncio.run(run())


@pytest.mark.parametrize("body", [b"", b"\1" * 15, b"\1" * 20, bytes(16), wire.encode_batch(
    wire.IngestBatch(1, [b"abc"]))[5:] + b"x"])  # fmt: skip
def test_a_batch_whose_lengths_do_not_add_up_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_batch("peer", body)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[MessageLog]:
    with MessageLog.open(tmp_path / "log") as log:
        yield log


def memory_of(log: MessageLog, tmp_path: Path) -> IngestMemory:
    return IngestMemory(str(tmp_path / "memory.snap"), log.path)


@pytest.mark.parametrize("arrived", range(6))
def test_of_what_was_announced_the_records_that_arrived_are_counted(
    tmp_path: Path, log: MessageLog, arrived: int
) -> None:
    memory = memory_of(log, tmp_path)
    memory.announce(log.next_position, [Announced("ann", 1, 2), Announced("bob", 7, 3)])
    log.append_many([b"x"] * arrived)
    memory.abandon()
    memory = memory_of(log, tmp_path)
    assert memory.last("ann") == min(arrived, 2)
    assert memory.last("bob") == (0 if arrived <= 2 else 6 + arrived - 2)
    assert (memory.totals.came, memory.totals.others) == (arrived, 0)
    memory.close()


def test_records_of_others_are_told_apart(tmp_path: Path, log: MessageLog) -> None:
    log.append_many([b"before"] * 3)
    memory = memory_of(log, tmp_path)
    memory.announce(log.next_position, [Announced("ann", 1, 2)])
    log.append_many([b"x"] * 2)
    memory.settle(log.next_position)
    memory.close()
    log.append(b"while the node was down")
    memory = memory_of(log, tmp_path)
    assert (memory.totals.came, memory.totals.others) == (2, 4)
    memory.close()


def test_a_hole_in_the_numbers_of_a_producer_is_a_loss(tmp_path: Path, log: MessageLog) -> None:
    memory = memory_of(log, tmp_path)
    memory.missing("ann", 11)
    memory.announce(log.next_position, [Announced("ann", 11, 1)])
    log.append(b"x")
    memory.settle(log.next_position)
    assert memory.totals == IngestTotals(
        log_id=memory.totals.log_id, position=2, came=11, others=0, lost={"power cut": 10}, boot=memory.totals.boot
    )
    memory.close()


def test_no_calendar_makes_a_producer_forgotten(
    tmp_path: Path, log: MessageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, real = memory_of(log, tmp_path), time.time_ns

    def append(writers: list[str], number: int) -> None:
        memory.announce(log.next_position, [Announced(writer, number, 1) for writer in writers])
        log.append_many([b"x"] * len(writers))
        memory.settle(log.next_position)

    names = [f"w{number}" for number in range(1000)]
    append(names, 1)
    monkeypatch.setattr(time, "time_ns", lambda: real() + 40 * 86_400 * 10**9)
    append(["w0"], 2)
    monkeypatch.setattr(time, "time_ns", real)
    append(["w1"], 2)
    memory.close()
    memory = memory_of(log, tmp_path)
    assert {memory.last(name) for name in names[2:]} == {1}
    assert (memory.last("w0"), memory.last("w1")) == (2, 2)
    memory.close()


def test_of_too_many_producers_those_heard_of_last_are_known(
    tmp_path: Path, log: MessageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "MOST_PRODUCERS", 10)
    monkeypatch.setattr(memory_module, "FORGET_AT_ONCE", 3)
    memory = memory_of(log, tmp_path)
    for number in range(30):
        monkeypatch.setattr(time, "time_ns", lambda now=10**18 - number: now)  # it goes back
        memory.announce(log.next_position, [Announced(f"w{number}", 1, 1)])
        log.append(b"x")
        memory.settle(log.next_position)
    memory.close()
    memory = memory_of(log, tmp_path)
    known = [number for number in range(30) if memory.last(f"w{number}")]
    assert 10 <= len(known) <= 12
    assert known == list(range(30))[-len(known) :]
    memory.close()


@pytest.mark.parametrize("reason", ["replaced", "power cut"])
def test_a_backup_under_the_log_is_no_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    path = str(tmp_path / "log")
    with MessageLog.open(path) as log:
        memory = memory_of(log, tmp_path)
        memory.announce(log.next_position, [Announced("ann", 1, 2)])
        log.append_many([b"x"] * 2)
        memory.settle(log.next_position)
        shutil.copytree(path, tmp_path / "backup")
        memory.announce(log.next_position, [Announced("ann", 3, 4)])
        log.append_many([b"x"] * 4)
        memory.settle(log.next_position)
        memory.close()
    shutil.rmtree(path)
    (tmp_path / "backup").rename(path)
    if reason == "power cut":
        monkeypatch.setattr(memory_module, "boot_id_of", lambda disk: b"another boot id!")
    with MessageLog.open(path) as log:
        memory = memory_of(log, tmp_path)
        assert memory.totals.lost == {reason: 4}
        assert f"4 acknowledged records are gone: {reason}" in caplog.text
        memory.missing("ann", 9)  # a producer that has gone on: 7 and 8 were acknowledged to it
        assert memory.totals.lost == {reason: 6}
        memory.close()
        memory = memory_of(log, tmp_path)
        assert (memory.totals.came, sum(memory.totals.lost.values())) == (6, 4)  # what was not written is not kept
        memory.close()


@pytest.mark.parametrize("format", ["messagelog", "xchannel"])
@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("width", [30, 7, 200])
def test_a_backup_under_the_log_that_others_have_written_to_is_refused(
    tmp_path: Path, format: str, announced: bool, width: int
) -> None:
    here, kept, memory_path = tmp_path / "here", tmp_path / "kept", str(tmp_path / "memory.snap")
    here.mkdir()

    def append(folder: Path, payloads: list[bytes]) -> int:
        with contextlib.closing(open_writer(str(folder / "log"), format=format)) as writer:
            writer.append_many(payloads)
        with open_log(folder / "log") as log:
            return log.next_position

    end = append(here, [b"before"])
    memory = IngestMemory(memory_path, str(here / "log"))
    memory.announce(end, [Announced("ann", 1, 2)])
    memory.settle(end := append(here, [b"record %023d" % n for n in (1, 2)]))
    shutil.copytree(here, kept)
    memory.announce(end, [Announced("ann", 3, 4)])
    memory.settle(end := append(here, [b"record %023d" % n for n in (3, 4, 5, 6)]))
    if announced:  # what never arrived, and its producer will hand over again
        memory.announce(end, [Announced("ann", 7, 1)])
    memory.abandon()
    shutil.rmtree(here)
    kept.rename(here)
    append(here, [b"x" * width] * 100)
    for _ in range(2):
        with pytest.raises(ReplacedError, match="which of 6 acknowledged records are gone is not known"):
            IngestMemory(memory_path, str(here / "log"))
    Path(memory_path).unlink()  # as the error says
    memory = IngestMemory(memory_path, str(here / "log"))
    assert (memory.totals.others, memory.last("ann")) == (103, 0)
    memory.close()


def test_a_log_that_was_made_again_is_counted_from_its_beginning(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log") as log:
        memory = memory_of(log, tmp_path)
        memory.announce(log.next_position, [Announced("ann", 1, 2)])
        log.append_many([b"x"] * 2)
        memory.settle(log.next_position)
        memory.close()
    (tmp_path / "log").rename(tmp_path / "old")
    with MessageLog.open(tmp_path / "log") as log:
        memory = memory_of(log, tmp_path)
        assert (memory.totals.came, memory.totals.others, memory.last("ann")) == (0, 0, 2)
        memory.close()


def test_a_channel_that_cannot_be_opened_is_told_to_the_operator_once_and_its_producers_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_for(tmp_path)
    memory = tmp_path / "d/ingest/readings.snap"
    memory.parent.mkdir(parents=True)
    memory.write_bytes(b"no store")

    async def run() -> None:
        async with serving(config):

            def work() -> None:
                for _ in range(2):
                    with pytest.raises(NotConnected, match=r"readings\.snap"):
                        IngestWriter(config.data, "readings", timeout=0.2).append(b"x")
                memory.unlink()
                with IngestWriter(config.data, "readings") as writer:
                    assert writer.append(b"x") == 1

            await off(work)

    with caplog.at_level("ERROR", logger="penstock.node"):
        asyncio.run(run())
    (told,) = [record.getMessage() for record in caplog.records if "cannot be opened" in record.getMessage()]
    assert told.startswith(f"ingest: channel readings cannot be opened, its producers wait: {memory}")
    assert payloads(config) == [b"x"]
