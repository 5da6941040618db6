"""A log that becomes another one while its shipper runs: nothing of it is shipped, and nothing of it is removed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from ship_use import FORMATS, fill, open_writer, read_all

from penstock.disk.failpoint import arm
from penstock.disk.objectstore import Obstore
from penstock.errors import NotFoundError, ReplacedError
from penstock.log.detect import open_log
from penstock.log.sidecar import sidecar_of
from penstock.ship import ShipOptions, Shipper

DELETING = ShipOptions(delete_local=True)


def ship_some(format: str, tmp_path: Path, store: Obstore) -> Shipper:
    """Return a shipper that has shipped three segments of a log, which are still here."""
    (tmp_path / "home").mkdir()
    with open_writer(format, tmp_path / "home/log") as writer:
        for start in range(0, 30, 10):
            fill(format, writer, start, 10)
    shipper = Shipper(tmp_path / "home/log", store, options=DELETING)
    sidecar_of(shipper._disk, shipper.path).write_cursor("late", shipper.head.first)
    assert shipper.step() == 3
    return shipper


def put_another(format: str, tmp_path: Path, segments: int) -> list[bytes]:
    """Put a log with another id where the first one was; return its payloads."""
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "home").mkdir()
    with open_writer(format, tmp_path / "home/log") as writer:
        return [p for turn in range(segments) for p in fill(format, writer, 1000 + 10 * turn, 10)]


@pytest.mark.parametrize("segments", [3, 6])
@pytest.mark.parametrize("format", FORMATS)
def test_another_log_under_the_same_name_is_neither_shipped_nor_removed(
    format: str, segments: int, store: Obstore, tmp_path: Path
) -> None:
    with ship_some(format, tmp_path, store) as shipper:
        before = shipper.head
        wanted = put_another(format, tmp_path, segments)
        with pytest.raises(ReplacedError, match="its log id changed"):
            shipper.step()
        assert shipper.head == before
    with open_log(str(tmp_path / "home/log")) as log:
        assert read_all(log) == wanted


@pytest.mark.parametrize("format", FORMATS)
def test_a_log_that_is_replaced_while_its_segments_go_up_is_not_named(
    format: str, store: Obstore, tmp_path: Path
) -> None:
    with ship_some(format, tmp_path, store) as shipper:
        before = shipper.head
        with open_writer(format, tmp_path / "home/log") as writer:
            fill(format, writer, 30, 10)
        with arm("ship.put.after", lambda: put_another(format, tmp_path, 2)), pytest.raises(ReplacedError):
            shipper.step()
        assert shipper.head == before


@pytest.mark.parametrize("more", [2, 6])
@pytest.mark.parametrize("format", FORMATS)
def test_a_backup_that_is_put_back_while_a_shipper_runs_is_neither_shipped_nor_removed(
    format: str, more: int, tmp_path: Path
) -> None:
    store = Obstore(MemoryStore(), "memory://m")
    (tmp_path / "home").mkdir()
    with open_writer(format, tmp_path / "home/log") as writer:
        fill(format, writer, 0, 10)
    shutil.copytree(tmp_path / "home", tmp_path / "backup")
    with open_writer(format, tmp_path / "home/log") as writer:
        fill(format, writer, 10, 10)
        fill(format, writer, 20, 10)
    with Shipper(tmp_path / "home/log", store, options=DELETING) as shipper:
        sidecar_of(shipper._disk, shipper.path).write_cursor("late", shipper.head.first)
        while shipper.step():
            pass
        before = shipper.head
        shutil.rmtree(tmp_path / "home")
        shutil.move(tmp_path / "backup", tmp_path / "home")
        with open_writer(format, tmp_path / "home/log") as writer:
            for turn in range(more):
                fill(format, writer, 1000 + 10 * turn, 10)
        with open_log(str(tmp_path / "home/log")) as log:
            wanted = read_all(log)
        with pytest.raises(ReplacedError):
            shipper.step()
        assert shipper.head == before
    with open_log(str(tmp_path / "home/log")) as log:
        assert read_all(log) == wanted


@pytest.mark.parametrize("format", FORMATS)
def test_a_log_that_is_away_is_waited_for(format: str, store: Obstore, tmp_path: Path) -> None:
    with ship_some(format, tmp_path, store) as shipper:
        shutil.move(tmp_path / "home", tmp_path / "away")
        with pytest.raises(NotFoundError, match="the log is gone"):
            shipper.step()
        shutil.move(tmp_path / "away", tmp_path / "home")
        with open_writer(format, tmp_path / "home/log") as writer:
            fill(format, writer, 30, 10)
        assert shipper.step() == 1
