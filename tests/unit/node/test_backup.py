"""A backup is made while everything is written, and compared; what is erased is nowhere."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path

import pytest

from penstock.disk import disk_for, object_store_for
from penstock.errors import CorruptionError, OptionsError, ReplacedError, UnsupportedError
from penstock.fold import follow
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.embedded.plan import Change
from penstock.kv.roles import StoreConfig
from penstock.log import open_log
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer
from penstock.mqtt.state_open import KeptBroker
from penstock.node import backup
from penstock.node.backup import MANIFEST, back_up, restore
from penstock.node.erase import erase_key, left_behind
from penstock.node.ingest.memory import Announced, IngestMemory
from penstock.node.ledger import read_ledger
from penstock.node.ledger.seams import FoldSeam, IngestSeam, ShipSeam, write_seams
from penstock.node.version import FILE, check_version, require_node
from penstock.ship import ShipOptions, Shipper, open_shipped
from penstock.store import AppendLogStore
from penstock.testing.log_conformance import contents
from penstock.types import KvUpdate, WatchCursor


def payloads(path: Path) -> list[bytes]:
    with open_log(str(path)) as log:
        found: list[bytes] = []
        at = log.first_position
        while len(batch := log.read(at)):
            found += batch.to_payloads()
            at = batch.next_position
        return found


def test_a_backup_of_what_is_being_written_has_everything_from_before(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "logs").mkdir(parents=True)
    stop = threading.Event()
    started = threading.Barrier(3)

    def write(log: MessageLog | Writer) -> None:
        log.append_many([b"%d" % n for n in range(1000)])
        started.wait()
        n = 1000
        while not stop.is_set():
            log.append_many([b"%d" % (n + k) for k in range(200)])
            n += 200
            stop.wait(0.001)  # a roll every 100 ms, all of it gone by retention after 100 more

    with (
        MessageLog.open(data / "logs" / "a", segment_bytes=50_000, max_messages=20_000) as first,
        Writer.open(data / "logs" / "b", roll_bytes=1 << 21) as second,
        AppendLogStore.open(data / "fold.snap") as store,
    ):
        threads = [threading.Thread(target=write, args=(log,)) for log in (first, second)]
        for thread in threads:
            thread.start()
        started.wait()
        store.apply([KvUpdate.put("k", b"v")], WatchCursor.of(7))
        try:
            report = back_up(str(data), str(tmp_path / "copy"))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert {log.path: log.records >= 1000 for log in report.logs} == {"logs/a": True, "logs/b": True}
    assert not (data / "penstock-backup-stage").exists()
    restore(str(tmp_path / "copy"), str(tmp_path / "again"))
    for name in ("a", "b"):
        found = [int(one) for one in payloads(tmp_path / "again" / "logs" / name)]
        assert found == list(range(found[0], found[-1] + 1))
        assert found[-1] >= 999
    with AppendLogStore.open(tmp_path / "again" / "fold.snap") as store:
        assert store.get("k") is not None
    assert oct((tmp_path / "again").stat().st_mode)[-3:] == "700"
    with MessageLog.open(tmp_path / "again" / "logs" / "a") as log:
        log.append(b"goes on")


def test_a_channel_that_rolls_while_it_is_copied_is_whole_in_the_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "logs").mkdir(parents=True)
    copy = backup._copy

    with Writer.open(tmp_path / "data" / "logs" / "b", roll_bytes=1 << 21) as writer:
        writer.append_many([b"x" * 1000] * 10)

        def copy_what_has_rolled(data: str, stage: str, target: str, name: str, files: dict[str, str]) -> None:
            if name == "logs/b" and not (tmp_path / "data" / "logs" / "b.1").exists():
                writer.append_many([b"y" * 1000] * 3000)
            copy(data, stage, target, name, files)

        monkeypatch.setattr(backup, "_copy", copy_what_has_rolled)
        back_up(str(tmp_path / "data"), str(tmp_path / "copy"))
    restore(str(tmp_path / "copy"), str(tmp_path / "again"))
    assert len(payloads(tmp_path / "again" / "logs" / "b")) == 3010


def test_a_channel_that_rolls_after_its_newest_file_was_copied_is_whole_in_the_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "logs").mkdir(parents=True)
    copy = backup._copy
    copied: list[str] = []

    with Writer.open(tmp_path / "data" / "logs" / "b", roll_bytes=1 << 21) as writer:
        writer.append_many([b"x" * 1000] * 10)

        def copy_before_it_rolls(data: str, stage: str, target: str, name: str, files: dict[str, str]) -> None:
            copy(data, stage, target, name, files)
            copied.append(name)
            if copied.count("logs/b") == 1 and name == "logs/b":
                writer.append_many([b"y" * 1000] * 3000)

        monkeypatch.setattr(backup, "_copy", copy_before_it_rolls)
        back_up(str(tmp_path / "data"), str(tmp_path / "copy"))
    assert copied.count("logs/b") == 2
    restore(str(tmp_path / "copy"), str(tmp_path / "again"))
    assert len(payloads(tmp_path / "again" / "logs" / "b")) == 3010


def test_a_backup_and_what_is_restored_of_it_have_their_names_when_the_power_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "logs").mkdir(parents=True)
    with MessageLog.open(tmp_path / "data" / "logs" / "a") as log:
        log.append(b"one")
    (tmp_path / "backups").mkdir()
    (tmp_path / "again").mkdir()
    synced: list[int] = []
    sync = os.fsync

    def noted(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        sync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    back_up(str(tmp_path / "data"), str(tmp_path / "backups" / "one"))
    assert synced[-1] == (tmp_path / "backups").stat().st_ino
    restore(str(tmp_path / "backups" / "one"), str(tmp_path / "again" / "data"))
    assert synced[-1] == (tmp_path / "again").stat().st_ino
    assert payloads(tmp_path / "again" / "data" / "logs" / "a") == [b"one"]


def test_a_backup_takes_the_place_of_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "logs").mkdir(parents=True)
    with MessageLog.open(data / "logs" / "a") as log:
        log.append(b"one")
    back_up(str(data), str(tmp_path / "backup"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("mine")
    for place in ("link", "file", "backup"):
        with pytest.raises(OptionsError, match="something is here already"):
            back_up(str(data), str(tmp_path / place))
        with pytest.raises(OptionsError, match="something is here already"):
            restore(str(tmp_path / "backup"), str(tmp_path / place))
    for place in (data, data / "logs" / "backup"):
        with pytest.raises(OptionsError, match=r"inside of what is copied|something is here already"):
            back_up(str(data), str(place))
    assert sorted(path.name for path in data.iterdir()) == ["logs"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup", "data", "file", "link"]


def test_a_backup_that_was_changed_is_not_restored(tmp_path: Path) -> None:
    (tmp_path / "data" / "logs").mkdir(parents=True)
    with MessageLog.open(tmp_path / "data" / "logs" / "a") as log:
        log.append_many([b"x"] * 10)
    back_up(str(tmp_path / "data"), str(tmp_path / "copy"))
    with pytest.raises(OptionsError, match="something is here already"):
        restore(str(tmp_path / "copy"), str(tmp_path / "data"))
    (segment,) = (tmp_path / "copy" / "logs" / "a").glob("*.log")
    data = segment.read_bytes()
    segment.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptionError, match="not those that were backed up"):
        restore(str(tmp_path / "copy"), str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()
    os.unlink(tmp_path / "copy" / MANIFEST)
    with pytest.raises(OptionsError, match="not a backup"):
        restore(str(tmp_path / "copy"), str(tmp_path / "again"))


def test_a_data_directory_of_a_later_release_is_refused(tmp_path: Path) -> None:
    assert check_version(str(tmp_path)) == 1
    (tmp_path / FILE).write_text('{"format": 99}\n')
    for look in (check_version, require_node):  # to serve in it, and to count what is there
        with pytest.raises(UnsupportedError, match="format 99"):
            look(str(tmp_path))


def test_what_belongs_to_a_key_is_erased_from_folds_and_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, store = tmp_path / "logs" / "readings", tmp_path / "latest.snap"
    log.parent.mkdir()
    with MessageLog.open(log, content=CONTENT, segment_bytes=2000) as writer:
        writer.append_many(
            [encode_envelope(Envelope(b"pump-%d" % (n % 3), b"secret of pump-%d" % (n % 3))) for n in range(300)]
        )
        end = writer.next_position
    with AppendLogStore.open(store) as fold:
        fold.apply([KvUpdate.put(f"pump-{n}", b"secret of pump-%d" % n) for n in range(3)], WatchCursor.of(301))
    write_seams(str(tmp_path), [
        FoldSeam("latest", str(log), str(store), "append-log"),
        IngestSeam("readings", str(log), str(tmp_path / "none.snap")),
    ])  # fmt: skip
    erased = erase_key(str(tmp_path), "pump-1", logs=True)
    assert [(one.kind, one.count) for one in erased] == [("fold", 1), ("log", 100)]
    assert caplog.messages == []  # indexes that it removed itself are no damage
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"pump-1" not in file.read_bytes(), file
    with open_log(str(log)) as reader:
        assert list(reader.verify()) == []
        assert (reader.next_position, len(payloads(log))) == (end, 300)
    with MessageLog.open(log) as writer:
        assert writer.append(encode_envelope(Envelope(b"pump-2", b"on"))) == end
    with AppendLogStore.open(store) as fold:
        assert [entry.key for entry in fold.range()] == ["pump-0", "pump-2"]
        assert fold.cursor().token.as_int() == 301


@pytest.mark.parametrize("sealed", [False, True])
def test_whoever_resumes_by_position_goes_on_after_the_last_record_it_saw_was_erased(
    tmp_path: Path, sealed: bool
) -> None:
    log, store = tmp_path / "logs" / "readings", str(tmp_path / "latest.snap")
    log.parent.mkdir()
    shelf, memory = object_store_for(str(tmp_path / "shelf")), str(tmp_path / "memory.snap")

    def append(count: int, key: bytes) -> None:
        with MessageLog.open(log, content=CONTENT) as writer:
            known = IngestMemory(memory, str(log))
            known.announce(writer.next_position, [Announced("ann", known.last("ann") + 1, count)])
            writer.append_many([encode_envelope(Envelope(key, b"%d" % n)) for n in range(count)])
            known.settle(writer.next_position)
            known.close()
            if sealed:
                writer.roll()

    def go_on() -> None:
        with open_log(log) as reader, AppendLogStore.open(store) as target:
            asyncio.run(follow(reader, target, once=True))
        with Shipper(str(log), shelf) as shipper:
            while shipper.step():
                pass
        assert {seam.seam: seam.alarm for seam in read_ledger(str(tmp_path)) if seam.alarm} == {}

    write_seams(str(tmp_path), [
        FoldSeam("latest", str(log), store, "append-log"),
        IngestSeam("readings", str(log), memory),
        ShipSeam(str(log), str(tmp_path / "shelf")),
    ])  # fmt: skip
    append(10, b"pump-2")
    append(10, b"pump-1")
    go_on()
    erase_key(str(tmp_path), "pump-1", logs=True)
    go_on()
    append(10, b"pump-3")
    go_on()
    with AppendLogStore.open(store) as fold:
        assert [entry.key for entry in fold.range()] == ["pump-2", "pump-3"]
    if sealed:
        with open_shipped(str(tmp_path / "shelf/readings")) as shipped:
            assert (shipped.next_position, len(contents(shipped))) == (31, 30)


def test_segments_from_which_a_record_was_erased_are_deleted_when_they_are_shipped(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "readings"
    log.parent.mkdir()
    with MessageLog.open(log, content=CONTENT) as writer:
        for _ in range(4):
            writer.append_many([encode_envelope(Envelope(b"pump-%d" % n, b"x")) for n in range(4)])
            writer.roll()
    shelf = object_store_for(str(tmp_path / "shelf"))
    with Shipper(str(log), shelf) as shipper:
        while shipper.step():
            pass
    erase_key(str(tmp_path), "pump-1", logs=True)
    with Shipper(str(log), shelf, options=ShipOptions(delete_local=True)) as shipper:
        shipper.step()
    with open_log(str(log)) as reader:
        assert reader.first_position == 9  # the last two stay


def test_a_backup_without_what_was_shipped_is_refused_also_when_a_key_was_erased_from_it(tmp_path: Path) -> None:
    log, kept = tmp_path / "logs" / "readings", tmp_path / "kept"
    log.parent.mkdir()
    shelf = object_store_for(str(tmp_path / "shelf"))

    def append(*keys: bytes) -> None:
        with MessageLog.open(log, content=CONTENT) as writer:
            writer.append_many([encode_envelope(Envelope(key, b"x")) for key in keys])
            writer.roll()

    append(b"pump-1", b"pump-2")
    shutil.copytree(log, kept)
    append(b"pump-1", b"pump-2")
    with Shipper(str(log), shelf) as shipper:
        assert shipper.step()
    shutil.rmtree(log)
    kept.rename(log)
    append(b"pump-3", b"pump-3")
    erase_key(str(tmp_path), "pump-1", logs=True)
    with pytest.raises(ReplacedError):
        Shipper(str(log), shelf)


def test_a_key_is_erased_from_a_bucket_and_its_history_and_who_follows_it_learns_so(tmp_path: Path) -> None:
    folder = str(tmp_path / "buckets" / "routes")
    os.makedirs(os.path.dirname(folder))
    disk = disk_for(folder)
    bucket = Bucket.open(folder, StoreConfig(name="routes"), disk=disk)
    for number in range(50):
        bucket.commit([Change("put", "pump-1", b"secret-%d" % number), Change("put", "pump-2", b"kept-%d" % number)])
    bucket.commit([Change("put", "pump-1", b"secret-lease", ttl_ns=10**12)])
    bucket.close()

    erased = erase_key(str(tmp_path), "pump-1", logs=True)

    assert [(one.kind, one.count) for one in erased] == [("bucket", 51)], "and the log of a bucket is no other log"
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert [path for path in files if b"secret" in path.read_bytes()] == []
    bucket = Bucket.open(folder, StoreConfig(name="routes"), disk=disk, make=False)
    assert bucket.entry("pump-1") is None
    assert bucket.entry("pump-2").value == b"kept-49"  # type: ignore[union-attr]
    assert list(bucket.reader.verify()) == []
    assert bucket.change(1) == KvUpdate.purge("pump-1", 1)
    assert bucket.commit([Change("put", "pump-1", b"anew")]) == [103]
    bucket.close()
    bucket = Bucket.open(folder, StoreConfig(name="routes"), disk=disk, make=False)
    assert bucket.entry("pump-1").value == b"anew"  # type: ignore[union-attr]
    bucket.close()


def test_what_erase_does_not_reach_is_named(tmp_path: Path) -> None:
    log, shelf = str(tmp_path / "logs" / "readings"), str(tmp_path / "shelf")
    os.makedirs(os.path.dirname(log))
    with MessageLog.open(log, content="envelope/1") as writer:
        writer.append(encode_envelope(Envelope(b"pump-1", b"secret")))
        writer.roll()
    with Shipper(log, object_store_for(shelf), node="edge") as shipper:
        assert shipper.step() == 1
    write_seams(str(tmp_path), [ShipSeam(log, shelf)])

    without = left_behind(str(tmp_path), logs=False)
    with_logs = left_behind(str(tmp_path), logs=True)

    assert [one.kind for one in without] == ["shipped", "log", "backup"]
    assert [one.kind for one in with_logs] == ["shipped", "backup"]
    assert "1 records are up" in with_logs[0].left


def test_the_retained_message_of_a_key_is_erased(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    try:
        kept = KeptBroker(str(tmp_path / "mqtt"), loop=loop)
        for name in ("pump-1", "pump-2", "alerts/pump-1"):
            kept.broker.publish_message(name, b"secret of " + name[-6:].encode(), retain=True)
        kept.close()
        erased = erase_key(str(tmp_path), "pump-1", logs=False, topics=["alerts/pump-1"])
        assert [(one.kind, one.count) for one in erased] == [("retained", 2)]
        for file in tmp_path.rglob("*"):
            assert not file.is_file() or b"secret of pump-1" not in file.read_bytes(), file
        kept = KeptBroker(str(tmp_path / "mqtt"), loop=loop)
        assert (len(kept.broker.retained), kept.broker.retained.get(b"pump-1")) == (1, None)
        kept.close()
    finally:
        loop.close()
