"""The node in one process: every part ended by a fault comes back, and the ledger still adds up."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog
from penstock.node import IngestWriter, Node
from penstock.node.config import check_config
from penstock.node.ledger import read_ledger
from penstock.node.options import FoldOptions, NodeConfig

EVERYTHING = """
data = "{folder}/d"
drain_seconds = 1.0
[mqtt]
port = 0
[channels]
port = 0
[http]
port = 0
[ledger]
look_seconds = 0.2
[[fold]]
name = "latest"
log = "{folder}/keyed"
store = "{folder}/latest.snap"
[[export]]
fold = "latest"
url = "file://{folder}/folds"
every_seconds = 0.2
[[ship]]
log = "{folder}/keyed"
url = "file://{folder}/up"
"""


def everything(folder: Path) -> NodeConfig:
    with MessageLog.open(folder / "keyed", content=CONTENT) as log:
        log.append_many([encode_envelope(Envelope(b"k%d" % n, b"v")) for n in range(10)])
    found, mistakes = check_config(EVERYTHING.format(folder=folder), {})
    assert found is not None, mistakes
    return found


def test_every_part_that_a_fault_ends_is_started_again(tmp_path: Path) -> None:
    config = everything(tmp_path)

    async def run() -> None:
        node = Node(config)
        await node.start()
        try:
            assert node.failures == {}
            names = list(node.health())
            assert len(names) == 9
            places = node.addresses
            for name in names:
                part = node.part(name)
                if part is not None:  # an export is away already, with its fold
                    await part.stop()  # without a word to whoever runs it
            async with asyncio.timeout(120):
                while any(not health.state.serves for health in node.health().values()) or any(
                    node.describe()["parts"][name]["restarts"] < 1 for name in names
                ):
                    await asyncio.sleep(0.05)

            def work() -> None:
                with IngestWriter(config.data, "readings") as writer:
                    writer.append_many([b"x"] * 7)

            await asyncio.get_running_loop().run_in_executor(None, work)
            assert set(places) == {"mqtt", "channels", "ingest", "http"}
            assert node.addresses == places, "whoever was connected finds them where they were"
        finally:
            await node.stop()

    asyncio.run(run())
    found = {seam.seam: seam for seam in read_ledger(config.data)}
    assert all(seam.ok for seam in found.values()), found
    assert found["fold:latest"].went == 10
    assert any((tmp_path / "folds").rglob("*latest*"))


def test_a_reload_while_the_node_starts_waits_for_it_and_starts_nothing_twice(tmp_path: Path) -> None:
    config = everything(tmp_path)
    more = FoldOptions(name="more", log=f"{tmp_path}/keyed", store=f"{tmp_path}/more.snap")
    wanted = msgspec.structs.replace(config, fold=[*config.fold, more])

    async def run() -> None:
        node = Node(config)
        starting = asyncio.create_task(node.start())
        while not node.health()["mqtt"].state.serves:
            await asyncio.sleep(0.001)
        assert await asyncio.gather(node.reload(wanted), node.reload(wanted)) == [[], []]
        await starting
        try:
            assert node.failures == {}
            assert "fold:more" in node.health()
            tasks = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("part ")]
            assert sorted(tasks) == sorted(f"part {name}" for name in node.health())
        finally:
            await node.stop()
        assert await node.reload(config) == ["it is stopping"]

    asyncio.run(run())


def test_readiness_says_so_when_the_disk_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = everything(tmp_path)
    answered = threading.Event()
    monkeypatch.setattr("penstock.node.node.PROBE_WAIT_SECONDS", 0.05)

    async def run() -> None:
        node = Node(config)
        await node.start()
        try:
            monkeypatch.setattr(node, "_probe", lambda: "" if answered.wait(60) else "never")
            async with asyncio.timeout(20):
                assert "has not been written and synced" in await node.readiness()
                assert "has not been written and synced" in await node.readiness()
                answered.set()
                while await node.readiness():
                    await asyncio.sleep(0.01)
        finally:
            answered.set()
            await node.stop()

    asyncio.run(run())


def test_what_a_part_says_has_no_secret_of_an_address(tmp_path: Path) -> None:
    bridge = (
        '[[mqtt.bridges]]\nname = "up"\nsend = [{filter = "a/#"}]\n'
        '[mqtt.bridges.remote]\nurl = "mqtt://me:secret@127.0.0.1:1"\npassword = "secret"\n'
    )
    ports = "[channels]\nport = 0\n[http]\nport = 0\n[mqtt]\nport = 0\n"
    config, mistakes = check_config(f'data = "{tmp_path}/d"\ndrain_seconds = 1\n{ports}{bridge}', {})
    assert config is not None, mistakes

    async def run() -> None:
        node = Node(config)
        await node.start()
        try:
            said = str(node.describe())
            assert "127.0.0.1:1" in said
            assert "secret" not in said
        finally:
            await node.stop()

    asyncio.run(run())
