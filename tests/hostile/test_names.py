"""Promise: no name leads out of the folder it is given for, and what is made belongs to its owner alone."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from command import penstock
from owners import OWNERS

from penstock.channels import ChannelManager, FileChannelStore, channel_hash
from penstock.errors import CorruptionError, OptionsError, PenstockError
from penstock.kv import EmbeddedConnection
from penstock.log.filechannel import FileChannel
from penstock.log.sidecar import sidecar_of
from penstock.log.xchannel import Reader, Writer
from penstock.mqtt import BridgeRule, BridgeSpec, Client, MqttServer, RemoteSpec, ServerOptions, TapSpec
from penstock.net.certificates import make_development_certificate
from penstock.net.credentials import CredentialsFile, change_credentials, hash_token
from penstock.spark.lake.features import inside
from penstock.spark.scratch import PREFIX, remove_abandoned
from penstock.spark.sink.log import Intent, SinkOptions, append_staged, clear_staged, read_intent, stage, write_intent

ANN = "ann@localhost"
CLIMBING = ["../../outside", "../outside", "..", ".", "", "a/b", "/etc", "a\0b"]


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder that nothing may touch."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("precious", "metadata.bin", "bucket.json", "0" * 32 + ".arrow"):
        (folder / name).write_bytes(b"precious")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    yield folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert all(path.read_bytes() == b"precious" for path in folder.iterdir())


# --- Names


@pytest.mark.parametrize("name", CLIMBING)
def test_a_channel_store_refuses_a_name_that_leads_elsewhere(name: str, outside: Path, tmp_path: Path) -> None:
    (tmp_path / "deep" / "data").mkdir(parents=True)
    store = FileChannelStore(str(tmp_path / "deep" / "data"))
    for use in (store.delete, store.load, store.folder):
        with pytest.raises(OptionsError, match="is no name of something in this folder"):
            use(name)
    assert outside.exists()


def test_a_linked_folder_of_a_channel_leads_nowhere(outside: Path, tmp_path: Path) -> None:
    async def scene() -> dict[str, str]:
        async with await ChannelManager.open(tmp_path / "data") as manager:
            return dict(manager.broken)

    digest = channel_hash("ops")
    store = FileChannelStore(str(tmp_path / "data"))
    store.make_root()
    (tmp_path / "data" / digest).symlink_to(outside)
    for use in (store.delete, store.load):
        with pytest.raises(OSError, match="symbolic link"):
            use(digest)
    assert "symbolic link" in asyncio.run(scene())[digest]
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "00000000000000000001.log").write_bytes(b"precious")
    (tmp_path / "data" / channel_hash("half")).symlink_to(tmp_path / "half")
    store.hashes()  # which sweeps what has no metadata
    assert (tmp_path / "half" / "00000000000000000001.log").read_bytes() == b"precious"


@pytest.mark.parametrize("what", ["b", "b/log"])
def test_a_linked_bucket_leads_nowhere(what: str, outside: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with EmbeddedConnection(tmp_path / "kv") as connection:
            with pytest.raises(OSError, match="symbolic link"):
                await connection.make("b")
            with pytest.raises(OSError, match="symbolic link"):
                await connection.delete("b")

    (tmp_path / "kv" / "b").parent.mkdir()
    if what == "b/log":
        (tmp_path / "kv" / "b").mkdir()
    (tmp_path / "kv" / what).symlink_to(outside)
    asyncio.run(scene())


@pytest.mark.parametrize("name", ["../x", "a/b", "a\0b", "x" * 300])
def test_the_name_of_a_receiver_leads_nowhere(name: str, tmp_path: Path) -> None:
    Writer.open(tmp_path / "ticks").close()
    with FileChannel.open(tmp_path / "jobs") as channel:
        for use in (channel.ack_rx, channel.group, lambda name: Reader.open(tmp_path / "ticks", name=name)):
            with pytest.raises(OptionsError):
                use(name)
    assert sorted(path.name for path in tmp_path.iterdir() if "ticks" not in path.name) == ["jobs"]


# --- What Spark stages


def batches() -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"payload": [b"one"], "timestamp_ns": [1]})


@pytest.fixture
def options(tmp_path: Path) -> SinkOptions:
    return SinkOptions(path=str(tmp_path / "out"), app="test")


def test_a_linked_folder_of_staged_files_leads_nowhere(options: SinkOptions, outside: Path, tmp_path: Path) -> None:
    (tmp_path / "out.penstock-staged-test").symlink_to(outside)
    for use in (lambda: stage(options, batches()), lambda: clear_staged(options)):
        with pytest.raises(OSError, match="symbolic link"):
            use()


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside/precious", "a/../../outside/precious", "a\0b", "", "x"])
def test_an_intent_that_names_files_elsewhere_is_refused(
    name: str, options: SinkOptions, outside: Path, tmp_path: Path
) -> None:
    staged = stage(options, batches())
    append_staged(options, 0, [staged])
    from penstock.disk import disk_for

    sidecar = sidecar_of(disk_for(options.path), options.path)
    write_intent(sidecar, "test", Intent(1, [name], 0))
    with pytest.raises(CorruptionError, match="penstock-spark-test"):
        read_intent(sidecar, "test")
    again = stage(options, batches())
    with pytest.raises(CorruptionError, match="penstock-spark-test"):
        append_staged(options, 1, [again])


def test_a_staged_file_that_is_a_link_is_refused(options: SinkOptions, outside: Path, tmp_path: Path) -> None:
    staged = stage(options, batches())
    file = tmp_path / "out.penstock-staged-test" / staged.file
    (outside.parent / "kept.arrow").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(outside.parent / "kept.arrow")
    with pytest.raises(CorruptionError, match="symbolic link"):
        append_staged(options, 0, [staged])


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../other/a.parquet", "a/../../b", "%2e%2e/b", "file:///etc/passwd", "s3://b/a", "a%00b"]
)
def test_a_file_of_a_table_that_is_elsewhere_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptionError, match="not in the table"):
        inside(str(tmp_path), path)


def test_a_file_of_a_table_that_leads_elsewhere_is_refused(outside: Path, tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "a.parquet").symlink_to(outside / "precious")
    with pytest.raises(CorruptionError, match="not in the table"):
        inside(str(tmp_path / "table"), "a.parquet")


def test_folders_of_others_in_the_temporary_folder_are_left_alone(
    outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    theirs, ours = tmp_path / "tmp" / f"{PREFIX}theirs", tmp_path / "tmp" / f"{PREFIX}ours"
    for folder in (theirs, ours):
        folder.mkdir(parents=True)
        (folder / "lock").touch()
    (tmp_path / "tmp" / f"{PREFIX}linked").symlink_to(outside)
    real = os.lstat

    def lstat(path: Any, **words: Any) -> os.stat_result:
        found = real(path, **words)
        if str(path) == str(theirs):
            return os.stat_result((*found[:4], os.geteuid() + 1, *found[5:]))
        return found

    monkeypatch.setattr(os, "lstat", lstat)
    assert remove_abandoned() == [str(ours)]
    assert theirs.exists()


# --- Modes


def private(folder: Path) -> list[str]:
    """What others may look at."""
    return [str(path) for path in sorted(folder.rglob("*")) if path.lstat().st_mode & 0o077 and not path.is_symlink()]


def test_what_is_made_belongs_to_its_owner_alone(tmp_path: Path, options: SinkOptions) -> None:
    os.umask(os.umask(0o022))

    async def scene() -> None:
        async with await ChannelManager.open(tmp_path / "deep" / "channels") as manager:
            ops = manager.channel("ops")
            await ops.join(ANN)
            await ops.configure(ANN, persist=True)
            await ops.broadcast(ANN, b"x")
        async with EmbeddedConnection(tmp_path / "kv") as connection:
            bucket = await connection.make("b")
            await bucket.writer.put("k", b"v")

    asyncio.run(scene())
    make_development_certificate(str(tmp_path / "certificates" / "deep"))
    change_credentials(str(tmp_path / "passwords"), "ann", hash_token("t0ken"))
    append_staged(options, 0, [stage(options, batches())])
    stage(options, batches())
    assert private(tmp_path) == []


def test_what_commands_make_belongs_to_its_owner_alone(tmp_path: Path) -> None:
    os.umask(os.umask(0o022))
    AppendLog = next(owner for owner in OWNERS if owner.name == "append-log")  # noqa: N806
    store = AppendLog.open(tmp_path / "fold")
    AppendLog.use(store, 1)
    store.close()
    with Writer.open(tmp_path / "ticks", region_bytes=4096, roll_bytes=4096) as writer:
        for _ in range(3):
            writer.append(b"x" * 3000)
    (tmp_path / "objects").mkdir(mode=0o700)
    for words in (
        ["init", str(tmp_path / "penstock.toml")],
        ["send", str(tmp_path / "jobs"), "hello"],
        ["artifact", "export", str(tmp_path / "fold"), str(tmp_path / "artifact")],
        ["artifact", "import", str(tmp_path / "artifact"), str(tmp_path / "imported")],
        ["ship", "run", "--once", str(tmp_path / "ticks"), f"file://{tmp_path}/objects"],
        ["ship", "restore", f"file://{tmp_path}/objects/ticks", str(tmp_path / "restored")],
    ):
        done = penstock(*words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    assert private(tmp_path) == []


# --- Files of settings


READERS: dict[str, Callable[[str], Any]] = {}


def reads(name: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    def note(function: Callable[[str], Any]) -> Callable[[str], Any]:
        READERS[name] = function
        return function

    return note


@reads("node")
def _node(path: str) -> Any:
    from penstock.node.config import load_config

    return load_config(path)


@reads("channels")
def _channels(path: str) -> Any:
    from penstock.channels.wire.config import load_config

    return load_config(path, {})


@reads("acl")
def _acl(path: str) -> Any:
    from penstock.mqtt.acl_files import AclFile

    return AclFile(path)


@reads("passwords")
def _passwords(path: str) -> Any:
    return CredentialsFile(path)


@reads("nats password")
def _nats(path: str) -> Any:
    from penstock.kv.nats.options import NatsOptions

    return NatsOptions(url="nats://localhost", user="u", password_file=path).credentials()


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_a_device_or_a_hole_in_the_place_of_settings_is_an_answer(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 1 << 40)
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 10)
    for path in (
        tmp_path / "pipe",
        Path("/dev/zero"),
        tmp_path,
        tmp_path / "hole",
        tmp_path / "noise",
        tmp_path / "no",
    ):
        with pytest.raises((PenstockError, OSError)) as caught:
            READERS[name](str(path))
        assert str(path) in str(caught.value)


def test_secrets_of_settings_are_in_no_message(tmp_path: Path) -> None:
    (tmp_path / "passwords").write_text("ann:$token$nothex-s3cret\n")
    with pytest.raises(OptionsError) as caught:
        CredentialsFile(str(tmp_path / "passwords"))
    assert "s3cret" not in str(caught.value)
    assert json.dumps(str(caught.value))


async def test_what_a_broker_makes_belongs_to_its_owner_alone(tmp_path: Path) -> None:
    os.umask(os.umask(0o022))
    bridge = BridgeSpec(name="up", remote=RemoteSpec(url="mqtt://127.0.0.1:9"), send=(BridgeRule(filter="a/#"),))
    tap = TapSpec(name="t", filter="a/#", path=str(tmp_path / "deep" / "logs" / "t"), format="filechannel")
    server = MqttServer(ServerOptions(port=0, bridges=(bridge,), taps=(tap,)), data=str(tmp_path / "new" / "broker"))
    await server.start()
    async with Client(server.addresses["mqtt"]) as client:
        await client.publish("a/b", b"x", qos=1)
    await server.stop()
    assert (tmp_path / "deep" / "logs" / "t").is_dir()
    assert private(tmp_path) == []
