"""Promise: whatever a small file of ours claims to be, reading it costs little: holes, depth, and what is no JSON."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.channels.wire.config import load_config as load_channels
from penstock.cli.mqtt import _options
from penstock.disk import PosixDisk
from penstock.errors import CorruptionError, OptionsError, PenstockError
from penstock.log.filechannel import FileChannel
from penstock.log.filechannel.group.journal import read_journal
from penstock.mqtt.acl_files import AclFile
from penstock.mqtt.state_open import KeptBroker
from penstock.node.backup import MANIFEST, restore
from penstock.node.config import load_config
from penstock.node.ledger.reckon import _lake
from penstock.node.ledger.seams import LakeSeam, read_seams
from penstock.node.version import check_version

READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "format of a node": ("penstock-format.json", check_version),
    "seams of a node": ("ledger/seams.json", read_seams),
    "manifest of a backup": (MANIFEST, lambda folder: restore(folder, folder + "/../again")),
    "audit of a table": ("lake.json", lambda folder: _lake(LakeSeam("lake", folder + "/lake.json"))),
    "journal of a group": ("journal", lambda folder: read_journal(PosixDisk(), folder + "/journal")),
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Half a gigabyte more than there is now, and no more."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + (512 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("size", [5 << 30, 1 << 40])
@pytest.mark.parametrize("name", READERS)
def test_a_hole_in_the_place_of_a_small_file_is_an_answer(name: str, size: int, tmp_path: Path) -> None:
    file, read = READERS[name]
    path = tmp_path / "data" / file
    path.parent.mkdir(parents=True)
    path.touch()
    os.truncate(path, size)
    with pytest.raises((PenstockError, OSError), match=path.name):
        read(str(tmp_path / "data"))


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"at": 1}', b"[" * 100_000, b'{"in_channel": "x"}']
)
def test_a_damaged_audit_of_a_table_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "lake.json").write_bytes(content)
    with pytest.raises(CorruptionError, match=r"lake\.json"):
        _lake(LakeSeam("lake", str(tmp_path / "lake.json")))


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a" + ".a" * 50_000 + " = 1", "[" + "a." * 50_000 + "a]"])
@pytest.mark.parametrize("load", [load_config, lambda path: load_channels(path, {}), lambda path: _options(path, {})])
def test_settings_that_go_deep_are_an_answer(load: Callable[[str], Any], text: str, tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(text)
    with pytest.raises(OptionsError, match=r"deep\.toml"):
        load(str(tmp_path / "deep.toml"))
    (tmp_path / "deep.acl").write_text("[roles.a]\n" + text)
    with pytest.raises(OptionsError, match="deep"):
        AclFile(str(tmp_path / "deep.acl"))


@pytest.mark.usefixtures("little_memory")
def test_a_journal_of_a_group_that_is_a_hole_is_set_aside(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "jobs") as channel:
        channel.append(b"one")
        with channel.group("g") as group:
            assert group.take(timeout=0) is not None
    os.truncate(tmp_path / "jobs" / "penstock-group-g", 1 << 40)
    with FileChannel.open(tmp_path / "jobs") as channel, channel.group("g") as group:
        assert group.take(timeout=0) is not None  # it was not done
    assert [path.stat().st_size for path in (tmp_path / "jobs").glob("*.bad")] == [1 << 40]


def use_broker(folder: Path) -> None:
    loop = asyncio.new_event_loop()
    try:
        KeptBroker(str(folder), loop=loop).close()
    finally:
        loop.close()


@pytest.mark.usefixtures("little_memory")
def test_the_state_of_a_broker_with_a_byte_behind_a_hole_is_an_answer(tmp_path: Path) -> None:
    use_broker(tmp_path / "broker")
    with (tmp_path / "broker" / "state.snap").open("r+b") as file:
        file.seek(1 << 40)
        file.write(b"x")
    with pytest.raises(CorruptionError, match=r"state\.snap"):
        use_broker(tmp_path / "broker")


def test_the_state_of_a_broker_that_is_damaged_twice_is_set_aside_twice(tmp_path: Path) -> None:
    use_broker(tmp_path / "broker")
    store = tmp_path / "broker" / "state.snap"
    for damage in (b"first", b"second"):
        store.write_bytes(damage)
        use_broker(tmp_path / "broker")
    aside = {path.read_bytes() for path in store.parent.glob("state.snap*.bad")}
    assert aside == {b"first", b"second"}
