"""Edge nodes under hardship, and a lake that is filled meanwhile: each record is in the lake exactly once.

Shippers die between their steps, the store fails before or after it did what was asked, clocks jump, the link is slow,
and drivers of the ingest die before their commit.  The long form has 20 nodes and 100 rounds.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from edge_use import POINTS, Flaky, Killed
from ship_use import FORMATS, fill, open_writer

from penstock.disk import object_store_for
from penstock.disk.failpoint import arm
from penstock.errors import LockedError, RetryError
from penstock.ship import ShipOptions, Shipper, compact_fleet, forget_compacted
from penstock.spark import lake
from penstock.spark.lake import committed
from penstock.spark.pipelines.loop import audit_loop
from penstock.testing.clock import FakeClock


def test_every_record_of_a_fleet_is_in_the_lake_exactly_once(
    spark: Any, tmp_path: Path, long_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, rounds, every = (20, 100, 10) if long_run else (3, 2, 2)
    chance, clock = random.Random(21), FakeClock()
    up, table = str(tmp_path / "up"), str(tmp_path / "lake")
    paced = ShipOptions(page_entries=3, delete_local=True, batch_bytes=500, bytes_per_second=100_000)
    side_by_side = ShipOptions(page_entries=3, delete_local=True)
    wanted: list[list[bytes]] = [[] for _ in range(nodes)]
    deaths = 0
    for number in range(nodes):
        (tmp_path / f"node{number}").mkdir()

    def kill(*_: Any, **__: Any) -> Any:
        raise Killed

    def work(number: int, flaky: bool) -> None:
        nonlocal deaths
        store = object_store_for(f"{up}/node{number}")
        place: Any = Flaky(store, chance) if flaky else store
        clock.jump(chance.choice([-3600, 0, 3600]) if flaky else 0)
        point = f"ship.{chance.choice(POINTS)}" if flaky and chance.random() < 0.5 else "nowhere"
        options = paced if number % 2 else side_by_side
        path = tmp_path / f"node{number}" / "log"
        try:
            with (
                arm(point, kill),
                Shipper(path, place, node=f"n{number}", options=options, clock=clock, sleep=clock.pass_) as shipper,
            ):
                while shipper.step():
                    pass
        except (Killed, RetryError, LockedError):
            deaths += 1

    def ingest() -> None:
        if chance.random() < 0.3:
            with monkeypatch.context() as dying, contextlib.suppress(Killed):
                dying.setattr(committed, "commit_files", kill)
                lake.ingest_committed(spark, up, table)
        lake.ingest_committed(spark, up, table)

    for turn in range(rounds):
        for number in range(nodes):
            kind = FORMATS[number % 3]
            with open_writer(kind, tmp_path / f"node{number}" / "log") as writer:
                for _ in range(chance.randrange(1, 4)):
                    wanted[number] += fill(kind, writer, len(wanted[number]), chance.randrange(1, 20))
            work(number, flaky=True)
        if turn % every == every - 1:
            ingest()
        if long_run and turn == rounds // 2:
            compact_fleet(up)
            forget_compacted(up)
    for number in range(nodes):
        work(number, flaky=False)
    ingest()
    rows = lake.read(spark, table).select("node", "payload").collect()
    found = Counter((row["node"], bytes(row["payload"])) for row in rows)
    assert found == Counter((f"n{number}", payload) for number in range(nodes) for payload in wanted[number])
    assert deaths or not long_run
    if long_run:
        assert all(check.ok for check in audit_loop(spark, up, table=table))
