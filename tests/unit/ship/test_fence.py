"""Who may ship: one shipper of one log, under a name that can be read back, to a store with conditions."""

from __future__ import annotations

from pathlib import Path

import pytest
from obstore.store import LocalStore, MemoryStore
from ship_use import FORMATS, fill, open_writer, read_all, seal, shipped

from penstock.disk.failpoint import arm
from penstock.disk.objectstore import Obstore, Tag
from penstock.errors import (
    LockedError,
    OptionsError,
    ReplacedError,
    RetryError,
    UnsupportedError,
)
from penstock.ship import ShipOptions, Shipper, empty_trash, forget_before
from penstock.ship.remote import ShippedLog
from penstock.testing.clock import FakeClock


def test_of_two_shippers_the_one_that_came_first_is_shut_out(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 5)
        first = Shipper(tmp_path / "log", store)
        second = Shipper(tmp_path / "log", store)
        with pytest.raises(LockedError, match="another shipper has taken over"):
            first.step()
        assert second.step() == 1
        fill("messagelog", writer, 5, 5)
        assert second.step() == 1
        assert second.head.epoch == 2
        first.close()
        second.close()


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_pruned_beside_a_shipper_does_not_shut_it_out(format: str, store: Obstore, tmp_path: Path) -> None:
    options = ShipOptions(page_entries=3, batch_bytes=1)
    clock = FakeClock()
    wanted: list[bytes] = []
    with (
        open_writer(format, tmp_path / "log") as writer,
        Shipper(tmp_path / "log", store, options=options, clock=clock) as shipper,
    ):
        for turn in range(30):
            wanted += fill(format, writer, turn * 10, 10)
            assert shipper.step() == 1
            if turn % 4 == 3:
                middle = shipper.head.segments[0].first
                assert forget_before(store, "log", middle, clock=clock).next == shipper.head.next
                clock.pass_(10)
                empty_trash(store, "log", 5, clock=clock)
        assert shipper.head.epoch == 1
    with shipped(store) as remote:
        assert list(remote.verify()) == []
        found = read_all(remote)
        assert found == wanted[-len(found) :]
        assert 10 < len(found) < len(wanted)


def test_pruning_goes_on_from_what_a_shipper_writes_meanwhile(store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        for turn in range(4):
            fill("messagelog", writer, turn * 10, 10)
        with Shipper(tmp_path / "log", store) as shipper:
            shipper.step()

            def ship_more() -> None:
                if shipper.head.next < 60:
                    fill("messagelog", writer, shipper.head.next - 1, 10)
                    assert shipper.step() == 1

            with arm("ship.prune.before", ship_more):
                head = forget_before(store, "log", 21)
            assert (head.first, head.next) == (21, shipper.head.next)
            fill("messagelog", writer, 100, 10)
            assert shipper.step() == 1
    with shipped(store) as remote:
        assert list(remote.verify()) == []


def test_a_swap_that_lands_late_is_adopted_and_repeats_nothing(tmp_path: Path) -> None:
    late: list[tuple[str, bytes, Tag]] = []

    memory = MemoryStore()
    store = Obstore(memory, "memory://")

    class Slow(Obstore):
        def swap(self, key: str, data: bytes, tag: Tag) -> Tag:
            if not key.endswith(".shipped.json"):
                return super().swap(key, data, tag)
            if not late:
                late.append((key, data, tag))
                raise RetryError("no answer")
            if len(late) == 1:
                late.append(late[0])
                store.swap(*late[0])  # it was on its way all the time
            return super().swap(key, data, tag)

    with open_writer("messagelog", tmp_path / "log") as writer:
        wanted = fill("messagelog", writer, 0, 10)
        with Shipper(tmp_path / "log", Slow(memory, "memory://")) as shipper:
            with pytest.raises(RetryError):
                shipper.step()
            shipper.step()
            assert len(late) == 2
            wanted += fill("messagelog", writer, 10, 10)
            assert shipper.step() == 1
    with shipped(store) as remote:
        assert read_all(remote) == wanted
        assert list(remote.verify()) == []
        assert remote.stat()["records"] == 20


@pytest.mark.parametrize("name", ["back\\slash", "tab\tname", "log.shipped.json", "line\n"])
def test_a_name_that_could_not_be_read_back_is_refused_at_once(name: str, store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / name) as writer:
        fill("messagelog", writer, 0, 10)
    with pytest.raises(OptionsError, match="name"):
        Shipper(tmp_path / name, store)
    assert list(store.objects()) == []
    with Shipper(tmp_path / name, store, channel="log") as shipper:  # under another name it goes
        assert shipper.step() == 1


@pytest.mark.parametrize("name", ["a b", "ü%20~#?", "..hidden", "[1]", "x'\"z", "a.segments", "-dash"])
def test_a_log_of_any_other_name_is_shipped_and_found(name: str, store: Obstore, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / name) as writer:
        wanted = fill("messagelog", writer, 0, 10)
        with Shipper(tmp_path / name, store) as shipper:
            shipper.step()
    with ShippedLog(f"memory://m/{name}", store) as remote:
        assert read_all(remote) == wanted
        assert list(remote.verify()) == []


def test_a_log_made_again_under_the_same_name_is_refused(store: Obstore, tmp_path: Path) -> None:
    for turn in range(2):
        with open_writer("messagelog", tmp_path / f"home{turn}") as writer:
            fill("messagelog", writer, 0, 5)
        if turn:
            with pytest.raises(ReplacedError):
                Shipper(tmp_path / "home1", store, channel="log")
        else:
            with Shipper(tmp_path / "home0", store, channel="log") as shipper:
                shipper.step()


@pytest.mark.parametrize("format", FORMATS)
def test_a_restored_backup_is_refused(format: str, store: Obstore, tmp_path: Path) -> None:
    import shutil

    (tmp_path / "home").mkdir()
    with open_writer(format, tmp_path / "home/log") as writer:
        fill(format, writer, 0, 5)
    shutil.copytree(tmp_path / "home", tmp_path / "backup")
    with open_writer(format, tmp_path / "home/log") as writer:
        fill(format, writer, 5, 5)
    with Shipper(tmp_path / "home/log", store) as shipper:
        while shipper.step():
            pass
    with pytest.raises(ReplacedError):
        Shipper(tmp_path / "backup/log", store)


def test_a_backup_that_went_another_way_is_refused(store: Obstore, tmp_path: Path) -> None:
    import shutil

    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 5)
    shutil.copytree(tmp_path / "log", tmp_path / "other")
    for name in ("log", "other"):
        with open_writer("messagelog", tmp_path / name) as writer:
            writer.append(name.encode() * 3)
            seal("messagelog", writer)
            fill("messagelog", writer, 100, 5)
    with Shipper(tmp_path / "log", store, channel="log") as shipper:
        shipper.step()
    with pytest.raises(ReplacedError, match="not what was shipped"):
        Shipper(tmp_path / "other", store, channel="log").step()


def test_a_store_without_conditions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 5)
    with pytest.raises(UnsupportedError):
        Shipper(tmp_path / "log", Obstore(LocalStore(tmp_path / "up"), "file://"))
