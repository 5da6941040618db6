"""Shipping: oldest first, once, resumable, fenced; nothing is deleted here that is not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ship_use import FORMATS, fill, open_writer, read_all, seal, shipped

from penstock.disk.failpoint import arm
from penstock.disk.objectstore import Obstore
from penstock.errors import (
    ClosedError,
    CorruptionError,
    ExpiredError,
    OptionsError,
    ReplacedError,
    UnsupportedError,
)
from penstock.log.detect import open_log
from penstock.log.face import Cuttable, LogReader
from penstock.log.sidecar import sidecar_of
from penstock.ship import ShipOptions, Shipper, TieredLog, empty_trash, forget_before, restore_span
from penstock.ship.manifest import decode_head, encode_head
from penstock.testing.clock import FakeClock


def test_a_shipped_log_has_the_face_of_logs(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 5)
        with Shipper(tmp_path / "log", store) as shipper:
            shipper.step()
    log: LogReader = shipped(store)
    assert (log.has_kinds, log.damage, log.damage_count, log.skip_damage(1)) == (False, [], 0, None)
    assert log.gaps(1, log.read(1)) == 0
    assert isinstance(log, Cuttable)
    log.close()


@pytest.mark.parametrize("format", FORMATS)
def test_a_shipped_log_is_read_with_the_positions_it_has_at_home(format: str, store: Obstore, tmp_path: Path) -> None:
    with open_writer(format, tmp_path / "log") as writer:
        wanted = [p for start in range(0, 1000, 200) for p in fill(format, writer, start, 200)]
        with Shipper(tmp_path / "log", store, node="edge-1") as shipper:
            assert shipper.step() == 5
            assert shipper.step() == 0
        with open_log(str(tmp_path / "log")) as local, shipped(store) as remote:
            assert (remote.format, remote.node, remote.content) == (format, "edge-1", "raw")
            assert remote.first_position == local.first_position
            assert remote.stat()["records"] == 1000
            assert read_all(remote, 130) == wanted
            here, there = local.first_position, remote.first_position
            while len(batch := local.read(here, 77)):
                other = remote.read(there, 77)
                count = min(len(batch), len(other))
                assert batch.positions[:count].tolist() == other.positions[:count].tolist()
                if batch.timestamps is not None and other.timestamps is not None:
                    assert batch.timestamps[:count].tolist() == other.timestamps[:count].tolist()
                here = there = int(batch.positions[count - 1]) + 1 if format == "messagelog" else batch.next_position
                if len(other) != len(batch):
                    here = there = other.next_position
            assert list(remote.verify()) == []
            entries = remote.entries(remote.first_position, remote.next_position)
            assert [entry.records for entry in entries] == [200] * 5
            times = [entry.min_time_ns for entry in entries]
            assert times == sorted(times) if format != "filechannel" else times == [None] * 5


@pytest.mark.parametrize("format", FORMATS)
def test_what_was_shipped_is_not_shipped_again_and_what_comes_later_is(
    format: str, store: Obstore, tmp_path: Path
) -> None:
    wanted: list[bytes] = []
    for turn in range(4):
        with open_writer(format, tmp_path / "log") as writer:
            wanted += fill(format, writer, turn * 50, 50)
        with Shipper(tmp_path / "log", store) as shipper:
            assert shipper.step() == 1
            assert shipper.status().backlog_segments == 0
    with shipped(store) as remote:
        assert read_all(remote) == wanted
        assert remote.head.epoch == 4


def test_a_message_log_that_goes_on_in_a_shipped_segment_is_shipped_with_it(store: Obstore, tmp_path: Path) -> None:
    """A writer that finds an empty newest segment removes it, and the one after it goes on in the one before."""
    with open_writer("messagelog", tmp_path / "log") as writer:
        wanted = fill("messagelog", writer, 0, 10)
    with Shipper(tmp_path / "log", store) as shipper:
        assert shipper.step() == 1
    open_writer("messagelog", tmp_path / "log").close()
    with open_writer("messagelog", tmp_path / "log") as writer:
        wanted += fill("messagelog", writer, 10, 5)
        with Shipper(tmp_path / "log", store) as shipper:
            assert shipper.step() == 1
            assert shipper.step() == 0
    with shipped(store) as remote:
        assert read_all(remote) == wanted
        assert remote.head.records == 15
        assert len(remote.head.segments) == 1
        assert {item.key for item in remote.head.trash}
        assert list(remote.verify()) == []


def test_compressed_segments_are_shipped_as_they_are(store: Obstore, tmp_path: Path) -> None:
    with open_writer("filechannel", tmp_path / "log", compression="gzip") as writer:
        wanted = [p for start in range(0, 500, 100) for p in fill("filechannel", writer, start, 100)]
        writer.compact()
        with Shipper(tmp_path / "log", store) as shipper:
            while shipper.step():
                pass
    with shipped(store) as remote:
        assert any(entry.name.endswith(".z") for entry in remote.head.segments)
        assert read_all(remote) == wanted
        assert list(remote.verify()) == []


STEPS = [
    "ship.fence.before", "ship.fence.after", "ship.put.before", "ship.put.after", "ship.page.after", "ship.swap.before",
    "ship.swap.after", "ship.cursor.before", "ship.cursor.after", "ship.drop.before",
]  # fmt: skip


@pytest.mark.parametrize("where", STEPS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_crash_between_any_two_steps_loses_and_repeats_nothing(
    where: str, format: str, store: Obstore, tmp_path: Path
) -> None:
    class Crash(BaseException):
        pass

    def crash() -> None:
        raise Crash

    options = ShipOptions(page_entries=2, delete_local=True, batch_bytes=1)
    reached = False
    with open_writer(format, tmp_path / "log") as writer:
        wanted = [p for start in range(0, 240, 40) for p in fill(format, writer, start, 40)]
        for _ in range(3):
            try:
                with arm(where, crash), Shipper(tmp_path / "log", store, options=options) as shipper:
                    while shipper.step():
                        pass
            except Crash:
                reached = True
        with Shipper(tmp_path / "log", store, options=options) as shipper:
            while shipper.step():
                pass
            assert shipper.head.records == 240
        with shipped(store) as remote:
            assert read_all(remote) == wanted
            assert list(remote.verify()) == []
    assert reached


def test_entries_move_into_pages_and_are_read_from_there(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        wanted = [p for start in range(0, 100, 5) for p in fill("messagelog", writer, start, 5)]
        with Shipper(tmp_path / "log", store, options=ShipOptions(page_entries=3, batch_bytes=1)) as shipper:
            while shipper.step():
                pass
            assert len(shipper.head.pages) == 6
            assert len(shipper.head.segments) == 2
    with shipped(store) as remote:
        assert read_all(remote) == wanted
        assert len(remote.entries(10, 21)) == 3
        assert len(remote._pages) <= 6


def test_times_and_positions_pick_segments_without_fetching_them(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        for start in range(5):
            writer.append_many([b"x"] * 10, timestamp_ns=(start + 1) * 10**12)
            writer.roll()
        with Shipper(tmp_path / "log", store, options=ShipOptions(page_entries=2)) as shipper:
            shipper.step()
    with shipped(store) as remote:
        assert [e.first for e in remote.entries(0, 10**9, 2 * 10**12, 3 * 10**12)] == [11, 21]
        assert [e.first for e in remote.entries(15, 35)] == [11, 21, 31]
        spans = remote.cut(1, 51, 1)
        assert [position for position, _ in spans] == [1, 11, 21, 31, 41]
        assert remote._disk.fetched_bytes == 0


# --- Keeping what is needed


@pytest.mark.parametrize("format", FORMATS)
def test_local_segments_go_only_when_shipped_and_passed_by_every_cursor(
    format: str, store: Obstore, tmp_path: Path
) -> None:
    options = ShipOptions(delete_local=True)
    with open_writer(format, tmp_path / "log", **({"collect": False} if format == "filechannel" else {})) as writer:
        wanted = [p for start in range(0, 250, 50) for p in fill(format, writer, start, 50)]
        sidecar = sidecar_of(writer._disk if hasattr(writer, "_disk") else _disk(), str(tmp_path / "log"))
        with open_log(str(tmp_path / "log")) as log:
            second = log.read(log.first_position, 60).next_position
        sidecar.write_cursor("billing", second)
        with Shipper(tmp_path / "log", store, options=options) as shipper:
            while shipper.step():
                pass
            with open_log(str(tmp_path / "log")) as log:
                assert log.first_position <= second
                kept = log.first_position
            sidecar.write_cursor("billing", shipper.head.next)
            shipper.step()
            with open_log(str(tmp_path / "log")) as log:
                assert log.first_position > kept
        with shipped(store) as remote:
            assert read_all(remote) == wanted


def test_who_has_read_a_shipped_file_to_its_end_goes_on_in_the_next_when_it_is_deleted(
    store: Obstore, tmp_path: Path
) -> None:
    with open_writer("xchannel", tmp_path / "log") as writer:
        writer.append_many([b"one", b"two"])
        with open_log(str(tmp_path / "log")) as log:
            end = log.next_position
        seal("xchannel", writer)
        wanted = fill("xchannel", writer, 0, 5)
        with Shipper(tmp_path / "log", store, options=ShipOptions(delete_local=True)) as shipper:
            while shipper.step():
                pass
        with open_log(str(tmp_path / "log")) as log:
            assert log.first_position > end
            assert log.read(end).to_payloads() == wanted


def _disk() -> Any:
    from penstock.disk import PosixDisk

    return PosixDisk()


def test_shipping_a_queue_that_nobody_has_read_takes_nothing_from_it(store: Obstore, tmp_path: Path) -> None:
    with open_writer("filechannel", tmp_path / "log") as writer:
        wanted = fill("filechannel", writer, 0, 10)
        with Shipper(tmp_path / "log", store) as shipper:
            shipper.step()
            for start in range(10, 50, 10):
                wanted += fill("filechannel", writer, start, 10)
                shipper.step()
        writer.gc()
        receiver = writer.ack_rx("late")
        assert [receiver.recv(timeout=5) for _ in wanted] == wanted
        receiver.ack()
        receiver.close()
        fill("filechannel", writer, 50, 10)
        writer.gc()
        assert writer.folder.first_position() > 0  # read and shipped: now it goes


@pytest.mark.parametrize("format", FORMATS)
def test_segments_that_retention_takes_while_they_are_listed_are_no_damage(format: str, tmp_path: Path) -> None:
    from penstock.disk import PosixDisk
    from penstock.ship.segments import sealed_segments

    options = {"collect": False} if format == "filechannel" else {}
    with open_writer(format, tmp_path / "log", **options) as writer:
        for start in range(0, 50, 10):
            fill(format, writer, start, 10)
        with open_log(str(tmp_path / "log")) as log:
            wanted = list(sealed_segments(_disk(), log, 0))

            class Racing(PosixDisk):
                def list(self, folder: str) -> list[str]:
                    names = super().list(folder)
                    for segment in wanted[:2]:
                        Path(segment.path).unlink(missing_ok=True)
                    return names

            assert list(sealed_segments(Racing(), log, 0)) == wanted[2:]
            going = sealed_segments(_disk(), log, wanted[2].first)
            assert next(going) == wanted[2]
            os.unlink(wanted[3].path)
            assert wanted[4] in going


def test_a_segment_whose_object_is_gone_is_not_deleted_here(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        wanted = [p for start in range(0, 30, 10) for p in fill("messagelog", writer, start, 10)]
        with Shipper(tmp_path / "log", store) as shipper:
            shipper.step()
            store.delete([shipper.head.segments[0].key])
        with Shipper(tmp_path / "log", store, options=ShipOptions(delete_local=True)) as shipper:
            shipper.step()
        with open_log(str(tmp_path / "log")) as log:
            assert read_all(log) == wanted


def test_segments_of_a_page_go_with_one_look_at_it_and_stay_when_it_was_pruned(store: Obstore, tmp_path: Path) -> None:
    asked: list[str] = []

    class Asked(Obstore):
        def get(self, key: str, *, most: int | None = None) -> Any:
            asked.append(key)
            return super().get(key, most=most)

    def first_here() -> int:
        with open_log(str(tmp_path / "log")) as log:
            return log.first_position

    clock, options = FakeClock(), ShipOptions(delete_local=True, page_entries=4, batch_bytes=1)
    with open_writer("messagelog", tmp_path / "log") as writer:
        for start in range(0, 120, 10):
            fill("messagelog", writer, start, 10)
        place = Asked(store._store, store.url)
        with Shipper(tmp_path / "log", place, options=options, clock=clock) as shipper:
            sidecar = sidecar_of(_disk(), str(tmp_path / "log"))
            sidecar.write_cursor("late", 1)
            while shipper.step():
                pass
            assert len(shipper.head.pages) == 2
            asked.clear()
            sidecar.write_cursor("late", 41)
            shipper.step()
            assert len([key for key in asked if ".pages/" in key]) == 1
            assert first_here() == 41
            forget_before(store, "log", 81, clock=clock)
            clock.pass_(2)
            empty_trash(store, "log", 1, clock=clock)
            sidecar.write_cursor("late", 81)
            assert shipper.step() == 0  # it has not seen that head yet
            assert first_here() == 41
            fill("messagelog", writer, 120, 10)
            assert shipper.step() == 1
            assert first_here() == 81


def test_retention_of_a_log_waits_for_what_is_not_shipped(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log", max_messages=10) as writer:
        fill("messagelog", writer, 0, 10)
        shipper = Shipper(tmp_path / "log", store)  # from now on what is behind its cursor stays
        for start in range(10, 100, 10):
            fill("messagelog", writer, start, 10)
        assert writer.first_seq == 1
        while shipper.step():
            pass
        fill("messagelog", writer, 100, 10)
        assert writer.first_seq > 1
        shipper.step()
        shipper.close()
    with shipped(store) as remote:
        assert len(read_all(remote)) == 110


def test_retention_of_a_channel_waits_for_what_is_not_shipped(store: Obstore, tmp_path: Path) -> None:
    with open_writer("xchannel", tmp_path / "log", keep_files=2, roll_bytes=1 << 20) as writer:
        fill("xchannel", writer, 0, 10)
        shipper = Shipper(tmp_path / "log", store)
        for start in range(10, 60, 10):
            fill("xchannel", writer, start, 10)
        with open_log(str(tmp_path / "log")) as log:
            assert log.first_position == 80
        while shipper.step():
            pass
        fill("xchannel", writer, 60, 10)
        with open_log(str(tmp_path / "log")) as log:
            assert log.first_position > 80
        shipper.step()
        shipper.close()
    with shipped(store) as remote:
        assert len(read_all(remote)) == 70


# --- One log of two parts, and spans brought back


@pytest.mark.parametrize("format", FORMATS)
def test_shipped_segments_and_the_live_tail_are_one_log(format: str, tmp_path: Path) -> None:
    from penstock.disk import object_store_for

    up = object_store_for(tmp_path / "up")
    with open_writer(format, tmp_path / "log") as writer:
        wanted = [p for start in range(0, 200, 50) for p in fill(format, writer, start, 50)]
        with Shipper(tmp_path / "log", up, options=ShipOptions(delete_local=True)) as shipper:
            while shipper.step():
                pass
            wanted += [b"tail %d" % number for number in range(20)]
            writer.append_many(wanted[-20:])
            with TieredLog(tmp_path / "log", tmp_path / "up/log") as log:
                with open_log(str(tmp_path / "log")) as local:
                    assert local.first_position > log.first_position
                assert read_all(log, 33) == wanted
                # Retention goes on while it is read.
                wanted += fill(format, writer, 1000, 50)
                wanted += fill(format, writer, 1050, 50)
                while shipper.step():
                    pass
                assert read_all(log, 33) == wanted
                with pytest.raises(ExpiredError):
                    log.read(-1 if format == "filechannel" else 0)


@pytest.mark.parametrize("format", FORMATS)
def test_a_span_is_brought_back_with_its_positions(format: str, tmp_path: Path) -> None:
    from penstock.disk import object_store_for

    with open_writer(format, tmp_path / "log") as writer:
        for start in range(0, 200, 50):
            fill(format, writer, start, 50)
        with Shipper(tmp_path / "log", object_store_for(tmp_path / "up")) as shipper:
            shipper.step()
            entries = shipper.head.segments
    first, following = restore_span(tmp_path / "up/log", tmp_path / "back", entries[1].first, entries[2].next)
    assert (first, following) == (entries[1].first, entries[2].next)
    with open_log(str(tmp_path / "back")) as back, open_log(str(tmp_path / "log")) as log:
        assert back.first_position == first
        batch = back.read(first, 1000)
        assert batch.positions.tolist() == log.read(first, 1000).positions[: len(batch)].tolist()
        assert read_all(back) == [b"record %06d" % number for number in range(50, 150)]
        assert back.stat()["log_id"] == log.stat()["log_id"]
    with pytest.raises(OptionsError):
        restore_span(tmp_path / "up/log", tmp_path / "back")


def test_a_span_is_not_brought_back_into_the_files_of_a_channel(tmp_path: Path) -> None:
    from penstock.disk import object_store_for

    with open_writer("xchannel", tmp_path / "log", keep_files=2, roll_bytes=1 << 20) as writer:
        for start in range(0, 50, 10):
            fill("xchannel", writer, start, 10)
            with Shipper(tmp_path / "log", object_store_for(tmp_path / "up")) as shipper:
                shipper.step()
                entries = shipper.head.segments
    assert not (tmp_path / "log").exists()
    for name in ("log.penstock-id", "log.penstock-lock"):  # as beside a foreign channel
        (tmp_path / name).unlink()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OptionsError, match="a channel is here already"):
        restore_span(tmp_path / "up/log", tmp_path / "log", entries[0].first, entries[0].next)
    assert sorted(tmp_path.iterdir()) == before


# --- Damage


def test_a_changed_object_never_reaches_a_reader(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 10)
        with Shipper(tmp_path / "log", store) as shipper:
            shipper.step()
            key = shipper.head.segments[0].key
    data, _ = store.get(key)
    store.put(key, data[:50] + bytes((data[50] ^ 1,)) + data[51:])
    with shipped(store) as remote:
        with pytest.raises(CorruptionError, match="BLAKE3"):
            remote.read(remote.first_position)
        (problem,) = remote.verify()
        assert "BLAKE3" in problem.reason


# --- How fast, and how far


def test_a_bandwidth_limit_is_kept_and_a_shipper_can_be_paused(store: Obstore, tmp_path: Path) -> None:
    clock = FakeClock()
    with open_writer("messagelog", tmp_path / "log") as writer:
        writer.append_many([bytes(10_000)] * 100)
        seal("messagelog", writer)
        options = ShipOptions(bytes_per_second=100_000)
        with Shipper(tmp_path / "log", store, options=options, clock=clock, sleep=clock.pass_) as shipper:
            shipper.pause()
            assert shipper.step() == 0
            status = shipper.status()
            assert (status.paused, status.backlog_segments) == (True, 1)
            assert status.lag_bytes > 1_000_000
            shipper.resume()
            assert shipper.step() == 1
            assert clock.monotonic() == pytest.approx(10, rel=0.1)
            assert shipper.status().lag_bytes == 0


def test_a_head_of_a_later_version_is_refused_by_name(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 10)
        with Shipper(tmp_path / "log", store) as shipper:
            shipper.step()
            head = shipper.head
    assert decode_head(encode_head(head)) == head
    store.put("log.shipped.json", encode_head(msgspec.structs.replace(head, version=2)))
    with pytest.raises(UnsupportedError, match="version 2"):
        shipped(store)
    store.put("log.shipped.json", encode_head(msgspec.structs.replace(head, next=head.next + 5)))
    with pytest.raises(CorruptionError, match="next is"):
        shipped(store)


def test_nothing_is_left_open(store: Obstore, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 10)
        with Shipper(tmp_path / "log", store) as shipper:
            shipper.step()
    with shipped(store) as remote:
        read_all(remote)
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_backup_is_refused_though_its_segment_was_compressed(store: Obstore, tmp_path: Path) -> None:
    import shutil

    from penstock.log.filechannel import FileChannel

    def send(path: Path, word: bytes) -> None:
        with FileChannel.open(path, segment_bytes=1 << 16) as queue:
            queue.append_many([word * 20] * 50)
            queue.rotate()

    send(tmp_path / "log", b"a")
    shutil.copytree(tmp_path / "log", tmp_path / "other")
    send(tmp_path / "log", b"b")
    with Shipper(tmp_path / "log", store, channel="log") as shipper:
        while shipper.step():
            pass
    for word in (b"c", b"d", b"e"):
        send(tmp_path / "other", word)
    with FileChannel.open(tmp_path / "other", segment_bytes=1 << 16) as queue:
        queue.compact()
    assert (tmp_path / "other" / "segment.1.z").exists()
    with pytest.raises(ReplacedError, match="is not the one that was read"):
        Shipper(tmp_path / "other", store, channel="log")


def test_a_file_that_claims_far_more_than_it_holds_is_not_shipped_and_what_comes_before_it_is(
    store: Obstore, tmp_path: Path
) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        for start in range(0, 15, 5):
            fill("messagelog", writer, start, 5)
        hollow = sorted((tmp_path / "log").glob("*.log"))[1]
        os.truncate(hollow, 1 << 40)
        with Shipper(tmp_path / "log", store) as shipper:
            assert shipper.step() == 1
            with pytest.raises(CorruptionError, match="bytes are not on the disk, and it is not shipped") as caught:
                shipper.step()
            assert (caught.value.file, shipper.head.next) == (str(hollow), 6)


def test_a_shipper_that_is_closed_does_not_read_a_long_file_to_its_end(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 5)
        with Shipper(tmp_path / "log", store) as shipper:
            with arm("ship.put.before", lambda: setattr(shipper, "_closed", True)), pytest.raises(ClosedError):
                shipper.step()
            assert shipper.head.segments == ()


def test_shipping_one_file_of_a_channel_does_not_look_at_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_writer("xchannel", tmp_path / "log") as writer:
        for start in range(0, 20, 5):
            fill("xchannel", writer, start, 5)
        with open_log(str(tmp_path / "log")) as log:
            assert isinstance(log, Cuttable)
            spans = log.cut(log.first_position, log.next_position, 1)
            monkeypatch.setattr("penstock.log.xchannel.log.discover", lambda *_: pytest.fail("it looked at all"))
            assert log.cut(spans[0][0], spans[1][0], 1) == spans[:1]


@pytest.mark.parametrize("format", FORMATS)
def test_a_backlog_is_shipped_without_a_look_at_the_whole_folder_for_each_segment(format: str, tmp_path: Path) -> None:
    from obstore.store import MemoryStore

    from penstock.disk import PosixDisk

    looks: dict[int, int] = {}

    class Counting(PosixDisk):
        def list(self, folder: str) -> list[str]:
            looks[segments] = looks.get(segments, 0) + 1
            return super().list(folder)

    for segments in (5, 50):
        path = tmp_path / f"{segments}"
        with open_writer(format, path) as writer:
            for start in range(segments):
                fill(format, writer, start, 1)
            with Shipper(path, Obstore(MemoryStore(), "memory://m"), disk=Counting()) as shipper:
                looks[segments] = 0
                assert shipper.step() == segments
    assert looks[50] <= looks[5] + 2
