"""Promise: what a channel keeps is a log like any other: cat, folds and taps read and copy it while the server runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from command import PENSTOCK
from wire_use import SECONDS, PlainAuthenticator, address, options, plain_token

from penstock.channels import ChannelServer, Client, channel_hash
from penstock.errors import OptionsError
from penstock.fold.follow import each_record, follow
from penstock.log.detect import open_log
from penstock.store import AppendLogStore
from penstock.types import KvUpdate


async def test_a_history_is_read_by_cat_and_a_fold_while_the_server_writes_it(tmp_path: Path) -> None:
    server = ChannelServer(tmp_path / "data", options(), modulator=PlainAuthenticator())
    login = plain_token("ann")
    async with asyncio.timeout(4 * SECONDS), server, await Client.connect(address(server), token=login) as ann:
        await ann.join("readings")
        await ann.configure("readings", persist=True, max_persist_messages=1000)
        await ann.broadcast_many("readings", [f"pump-{n % 3}={n}".encode() for n in range(100)])
        path = str(tmp_path / "data" / channel_hash("readings"))

        process = await asyncio.create_subprocess_exec(
            *PENSTOCK, "cat", path, "--json", "-n", "2", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        rows = [json.loads(line) for line in out.splitlines()]
        assert process.returncode == 0
        assert [(row["seq"], row["from"], row["payload"]) for row in rows] == [
            (1, "ann@localhost", "pump-0=0"),
            (2, "ann@localhost", "pump-1=1"),
        ]

        stop = asyncio.Event()
        newest = each_record(lambda record: KvUpdate.put(*_pair(bytes(record.payload))))
        with open_log(path) as log, AppendLogStore.open(tmp_path / "newest.snap") as store:
            folding = asyncio.create_task(
                follow(log, store, newest, stop=stop, on_applied=lambda cursor: stop.set() if is_last(cursor) else None)
            )
            await ann.broadcast_many("readings", [b"pump-0=last", b"pump-9=first"])  # it goes on meanwhile

            def is_last(cursor: object) -> bool:
                return store.get("pump-9") is not None

            await folding
            found = {key: entry.value for key in ("pump-0", "pump-1", "pump-9") if (entry := store.get(key))}
        assert found == {"pump-0": b"last", "pump-1": b"97", "pump-9": b"first"}


def _pair(payload: bytes) -> tuple[str, bytes]:
    name, _, value = payload.partition(b"=")
    return name.decode(), value


async def test_a_tap_copies_a_channel_into_a_log_of_its_own(tmp_path: Path) -> None:
    taps = {"ops": str(tmp_path / "ops"), "*": str(tmp_path / "all")}
    server = ChannelServer(tmp_path / "data", options(tap=taps))
    async with asyncio.timeout(SECONDS), server, await Client.connect(address(server), username="ann") as ann:
        for handler in ("ops", "jobs"):
            await ann.join(handler)
            await ann.broadcast_many(handler, [f"{handler} {n}".encode() for n in range(50)])
        await ann.broadcast("ops", b"the end")
    wanted = [b"ops %d" % n for n in range(50)]
    with open_log(str(tmp_path / "ops")) as log:
        batch = log.read(log.first_position, 1000)
        assert batch.to_payloads() == [*wanted, b"the end"]
        assert {row["from"] for row in batch.to_pylist()} == {b"ann@localhost"}
    with open_log(str(tmp_path / "all")) as log:
        assert sorted(log.read(log.first_position, 1000).to_payloads()) == sorted(
            [*wanted, b"the end", *(b"jobs %d" % n for n in range(50))]
        )


@pytest.mark.parametrize("format", ["xchannel", "filechannel", "messagelog"])
async def test_a_tap_writes_any_log(format: str, tmp_path: Path) -> None:
    """New by name, and again as it was found."""
    path = str(tmp_path / "copy")
    for turn, tap in enumerate((f"{format}:{path}", path)):
        server = ChannelServer(tmp_path / "data", options(tap={"ops": tap}))
        async with asyncio.timeout(SECONDS), server, await Client.connect(address(server), username="ann") as ann:
            await ann.join("ops")
            await ann.broadcast_many("ops", [b"%d" % turn] * 3)
    with open_log(path) as log:
        assert log.format == format
        assert log.read(log.first_position, 100).to_payloads() == [b"0"] * 3 + [b"1"] * 3
    other = "xchannel" if format != "xchannel" else "messagelog"
    with pytest.raises(OptionsError, match=f"is a log of format {format}"):
        await ChannelServer(tmp_path / "data", options(tap={"ops": f"{other}:{path}"})).start()


async def test_a_tap_that_cannot_write_loses_nothing_of_the_channel(tmp_path: Path) -> None:
    """A tap's disk trouble is the tap's: members hear everything, and the copies that are missing are counted."""
    from penstock.channels.wire.tap import LOST

    before = LOST.value()
    server = ChannelServer(tmp_path / "data", options(tap={"ops": str(tmp_path / "ops")}))
    async with asyncio.timeout(SECONDS), server:
        (tap,) = server._taps
        assert tap._writing is not None
        tap._writing.close()
        async with (
            await Client.connect(address(server), username="ann") as ann,
            await Client.connect(address(server), username="bob") as bob,
        ):
            await ann.join("ops")
            await bob.join("ops")
            assert await bob.broadcast("ops", b"still there") == 1
            async for message in ann.messages():
                assert message.payload == b"still there"
                break
            while LOST.value() == before:
                await asyncio.sleep(0.01)
    assert LOST.value() == before + 1


async def test_a_tap_copies_the_largest_message_that_its_server_takes(tmp_path: Path) -> None:
    given = options(limits={"max_payload_size": 100_000}, tap={"ops": str(tmp_path / "ops")})
    server = ChannelServer(tmp_path / "data", given)
    async with asyncio.timeout(SECONDS), server, await Client.connect(address(server), username="ann") as ann:
        await ann.join("ops")
        await ann.broadcast("ops", b"x" * 100_000)
    with open_log(str(tmp_path / "ops")) as log:
        assert [len(payload) for payload in log.read(log.first_position, 10).to_payloads()] == [100_000]
