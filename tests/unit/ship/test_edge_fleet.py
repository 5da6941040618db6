"""Edge nodes of all formats: every record is shipped once, and nothing is deleted here before it is there.

Shippers die, the store fails before or after it did what was asked, clocks jump, the link is slow.  The long form has
20 nodes and 100 rounds.  Each round reads what came in the last ten, every tenth and the end all of it.
"""

from __future__ import annotations

import random
import uuid
from pathlib import Path
from typing import Any

from edge_use import POINTS, Flaky, Killed
from ship_use import FORMATS, Since, fill, open_writer, read_all

from penstock.disk import object_store_for
from penstock.disk.failpoint import arm
from penstock.errors import LockedError, PenstockError, RetryError
from penstock.ship import ShipOptions, Shipper
from penstock.ship.remote import ShippedLog
from penstock.ship.tiered import TieredLog
from penstock.testing.clock import FakeClock


def test_every_record_of_a_fleet_is_shipped_once_and_none_is_deleted_early(tmp_path: Path, long_run: bool) -> None:
    chance = random.Random(20)
    nodes, rounds = (20, 100) if long_run else (8, 5)
    url = f"memory://{uuid.uuid4().hex}"
    clock = FakeClock()
    paced = ShipOptions(page_entries=2, delete_local=True, batch_bytes=500, bytes_per_second=100_000)
    side_by_side = ShipOptions(page_entries=2, delete_local=True, batch_bytes=50_000)
    wanted: list[list[bytes]] = [[] for _ in range(nodes)]
    since = [Since() for _ in range(nodes)]
    deaths = 0

    def kill() -> None:
        raise Killed

    def work(number: int, flaky: bool) -> None:
        nonlocal deaths
        store = object_store_for(f"{url}/node{number}")
        place: Any = Flaky(store, chance) if flaky else store
        path = tmp_path / f"node{number}" / "log"
        clock.jump(chance.choice([-3600, 0, 3600]) if flaky else 0)
        options = paced if number % 2 else side_by_side
        point = f"ship.{chance.choice(POINTS)}" if flaky and chance.random() < 0.5 else "nowhere"
        try:
            with (
                arm(point, kill),
                Shipper(path, place, node=f"n{number}", options=options, clock=clock, sleep=clock.pass_) as s,
            ):
                while s.step():
                    pass
        except (Killed, RetryError, LockedError):
            deaths += 1

    for number in range(nodes):
        (tmp_path / f"node{number}").mkdir()
    for turn in range(rounds):
        for number in range(nodes):
            kind = FORMATS[number % 3]
            with open_writer(kind, tmp_path / f"node{number}" / "log") as writer:
                for _ in range(chance.randrange(1, 4)):
                    wanted[number] += fill(kind, writer, len(wanted[number]), chance.randrange(1, 20))
            work(number, flaky=True)
            try:
                with TieredLog(tmp_path / f"node{number}" / "log", f"{url}/node{number}/log") as log:
                    assert since[number].read(log, turn) == wanted[number], (turn, number)
            except PenstockError:
                assert object_store_for(f"{url}/node{number}").head("log.shipped.json") is None
    assert deaths
    for number in range(nodes):
        work(number, flaky=False)
        with ShippedLog(f"{url}/node{number}/log") as log:
            assert read_all(log) == wanted[number]
            assert log.head.records == len(wanted[number])
            assert list(log.verify()) == []
