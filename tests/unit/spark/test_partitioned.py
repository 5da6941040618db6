"""Partitioned tables and compaction without a JVM, read back by those who had no part in writing them."""

from __future__ import annotations

import datetime as dt
import os
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from penstock.errors import OptionsError, UnsupportedError
from penstock.log.filechannel import FileChannel
from penstock.log.xchannel import Writer
from penstock.spark.lake import Compaction, commit_files, compaction, join_small_files, open_table
from penstock.spark.lake.compaction import choose
from penstock.spark.lake.reading import files_of
from penstock.spark.lake.skipping import TableFile, conditions_in, files_that_may_match
from penstock.spark.lake.table import DataFile, data_files, schema_of
from penstock.spark.pipelines import compact as compacting
from penstock.spark.pipelines.compact import compact
from penstock.spark.source import export as exporting
from penstock.spark.source.columns import BASE
from penstock.spark.source.table import ExportSource

DAY = 86_400 * 10**9
BY = ("date", "channel", "node")


def export(folder: Path, table: Path, by: tuple[str, ...] = BY, **options: str) -> list[Any]:
    told = {"path": str(folder), "table": str(table), "partitionBy": ",".join(by), "node": "edge/7", **options}
    reader = ExportSource(told).reader(None)  # type: ignore[arg-type]
    return [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]


def commit(table: Path, batch: int, rows: list[Any], by: tuple[str, ...] = BY) -> bool:
    return commit_files(str(table), "app", batch, data_files(rows), schema_of(BASE, by), partition_by=by)


@pytest.fixture
def channels(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    (folder / "site ü").mkdir(parents=True)
    for name in ("a", "site ü/b"):
        with Writer.open(folder / name) as writer:
            times = [n * DAY // 4 for n in range(12)]
            writer.append_many([b"%d" % n for n in range(12)], kind=3, timestamp_ns=times)
    with FileChannel.open(folder / "queue") as queue:  # whose records have no time
        queue.append_many([b"x", b"y"])
    return folder


def test_a_partitioned_export_is_read_alike_by_delta_rs_polars_and_duckdb(channels: Path, tmp_path: Path) -> None:
    table = tmp_path / "lake"
    rows = export(channels, table)
    assert len(rows) == 3 + 3 + 1
    assert commit(table, 0, rows)
    assert not commit(table, 0, rows)
    expected = sorted(
        [(dt.date(1970, 1, 1 + n // 4), name, b"%d" % n) for name in ("a", "site ü/b") for n in range(12)]
    )
    found = DeltaTable(str(table))
    assert found.metadata().partition_columns == list(BY)
    for held in (
        found.to_pyarrow_table().to_pylist(),
        pl.read_delta(str(table)).to_dicts(),
        duckdb.from_arrow(found.to_pyarrow_dataset()).to_arrow_table().to_pylist(),
    ):
        timed = sorted((row["date"], row["channel"], row["payload"]) for row in held if row["date"] is not None)
        assert timed == expected
        timeless = {(row["channel"], row["payload"]) for row in held if row["date"] is None}
        assert timeless == {("queue", b"x"), ("queue", b"y")}
        assert {row["node"] for row in held} == {"edge/7"}
    by_folder = duckdb.read_parquet(f"{table}/*/*/*/*.parquet", hive_partitioning=True)  # who knows no Delta at all
    assert by_folder.filter("channel = 'site ü/b' and date = '1970-01-02'").aggregate("count(*)").fetchall() == [(4,)]


def test_a_task_that_runs_twice_writes_the_same_files_however_few_may_be_open(
    channels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "MOST_OPEN", 1)
    with Writer.open(channels / "c") as writer:  # days that come again and again
        writer.append_many([b"%d" % n for n in range(40)], timestamp_ns=[n % 2 * DAY for n in range(40)])
    first = export(channels, tmp_path / "lake", batchBytes="20")
    assert export(channels, tmp_path / "lake", batchBytes="20") == first
    assert len({row["file"] for row in first}) == len(first) > 9
    assert sum(row["records"] for row in first) == 26 + 40
    assert len([name for _, _, names in os.walk(tmp_path / "lake") for name in names]) == len(first)
    commit(tmp_path / "lake", 0, first)
    held = pl.read_delta(str(tmp_path / "lake")).filter(pl.col("channel") == "c")
    assert sorted(int(payload) for payload in held["payload"]) == list(range(40))


def test_what_a_table_cannot_be_partitioned_by_is_refused(channels: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="partition by kind"):
        export(channels, tmp_path / "lake", by=("kind",))
    commit(tmp_path / "lake", 0, export(channels, tmp_path / "lake", by=("date",)), by=("date",))
    with pytest.raises(OptionsError, match="it is partitioned by date, not so"):
        commit(tmp_path / "lake", 1, export(channels, tmp_path / "lake"))


def small_files(table: Path, count: int, first: int = 0, **columns: Any) -> None:
    for number in range(first, first + count):
        rows = pa.table({"n": [number], "part": ["ab"[number % 2]], **columns})
        write_deltalake(str(table), rows, mode="append", partition_by=["part"], schema_mode="merge")


def rows_of(table: Path) -> list[int]:
    return sorted(DeltaTable(str(table)).to_pyarrow_table().column("n").to_pylist())


def test_small_files_are_joined_by_size_age_and_budget(tmp_path: Path) -> None:
    table = tmp_path / "t"
    small_files(table, 20)
    size = max(file.size for file in files_of(DeltaTable(str(table)), str(table)))
    plan = Compaction(target_bytes=100 * size, min_files=5, min_age_seconds=3600)
    assert join_small_files(str(table), plan).files == 0  # they are young
    plan = Compaction(target_bytes=100 * size, min_files=11)
    assert join_small_files(str(table), plan).files == 0  # there are ten in each partition
    plan = Compaction(target_bytes=100 * size, min_files=5, budget_bytes=6 * size)
    done = join_small_files(str(table), plan)
    assert (done.into, 6 <= done.files <= 7) == (1, True)  # so much and no more at once
    assert rows_of(table) == list(range(20))
    while join_small_files(str(table), plan).files:
        assert rows_of(table) == list(range(20))
    assert len(DeltaTable(str(table)).file_uris()) < 20
    added = [action for action in DeltaTable(str(table)).history() if action["operation"] == "WRITE"]
    assert len(added) > 20
    small_files(table, 4, 20, more=["later"])  # a column that joined files did not have
    done = join_small_files(str(table), Compaction(target_bytes=1 << 20, min_files=2))
    assert done.files > 0
    assert rows_of(table) == list(range(24))
    late = pl.read_delta(str(table)).filter(pl.col("more").is_not_null())
    assert sorted(late["n"]) == [20, 21, 22, 23]


def test_whoever_commits_meanwhile_wins_against_the_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "t"
    small_files(table, 10)
    plan = Compaction(target_bytes=1 << 20, min_files=2)
    from penstock.spark.lake import compaction

    join = compaction._join

    def meanwhile(*given: Any) -> Any:
        DeltaTable(str(table)).delete("n = 4")
        return join(*given)

    with monkeypatch.context() as patch:
        patch.setattr(compaction, "_join", meanwhile)
        done = join_small_files(str(table), plan)
    assert (done.conflict, done.files) == (True, 0)
    assert rows_of(table) == [0, 1, 2, 3, 5, 6, 7, 8, 9]  # and not the deleted row again
    assert not [name for _, _, names in os.walk(table) for name in names if name.startswith("joined")]
    assert join_small_files(str(table), plan).files > 0
    assert rows_of(table) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("other", ["joins", "optimizes", "appends"])
def test_a_compaction_beside_another_doubles_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    from penstock.spark.lake import compaction

    table, join, raced = tmp_path / "t", compaction._join, 0
    small_files(table, 10)

    def meanwhile(*given: Any) -> Any:
        nonlocal raced
        raced += 1
        if raced == 1 and other == "joins":
            plan = Compaction(target_bytes=1 << 20, min_files=2)
            assert join_small_files(str(table), plan).files == 10
        elif raced == 1 and other == "optimizes":
            DeltaTable(str(table)).optimize.compact()
        elif raced == 1:
            small_files(table, 1, 10)
        return join(*given)

    monkeypatch.setattr(compaction, "_join", meanwhile)
    assert compact(str(table))["files_after"] == 2
    assert raced > 1
    assert rows_of(table) == list(range(11 if other == "appends" else 10))


def test_a_joined_file_is_committed_behind_what_came_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.spark.lake import compaction

    table, join = tmp_path / "t", compaction._join
    small_files(table, 10)

    def meanwhile(*given: Any) -> Any:
        monkeypatch.setattr(compaction, "_join", join)
        small_files(table, 3, 10)
        return join(*given)

    monkeypatch.setattr(compaction, "_join", meanwhile)
    done = join_small_files(str(table), Compaction(target_bytes=1 << 20, min_files=5))
    assert (done.files, done.into, done.conflict) == (10, 2, False)  # and is not written again
    assert rows_of(table) == list(range(13))


def test_rows_are_deleted_by_age_beside_a_writer_and_a_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, real = tmp_path / "t", DeltaTable.delete
    small_files(table, 10, timestamp=pa.array([0], pa.timestamp("us", "UTC")))

    def delete(found: DeltaTable, *given: Any) -> Any:
        monkeypatch.undo()
        assert join_small_files(str(table), Compaction(target_bytes=1 << 20, min_files=2)).files == 10
        small_files(table, 1, 10, timestamp=pa.array([dt.datetime.now(dt.UTC)], pa.timestamp("us", "UTC")))
        return real(found, *given)

    monkeypatch.setattr(DeltaTable, "delete", delete)
    assert compact(str(table), keep_days=1)["deleted_rows"] == 10
    assert rows_of(table) == [10]


def test_partitions_of_any_type_keep_their_values_when_files_are_joined(tmp_path: Path) -> None:
    values = {
        "text": pa.array(["a b/ü%=*\x01", None]),
        "flag": pa.array([True, False]),
        "day": pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
        "at": pa.array([1, -1], pa.timestamp("us", "UTC")),
        "local": pa.array([1, None], pa.timestamp("us")),
        "rate": pa.array([-0.5, float("inf")]),
        "sum": pa.array([Decimal("0.01"), Decimal("12345678.90")], pa.decimal128(10, 2)),
        "small": pa.array([-128, 127], pa.int8()),
    }
    raw = pa.table({"raw": [b"\x00\xff", b"ab"], "n": [1, 2]})
    write_deltalake(str(tmp_path / "raw"), raw, partition_by=["raw"])
    with pytest.raises(UnsupportedError, match=r"it uses partitions of bytes \(raw\)"):  # nobody reads them alike
        open_table(str(tmp_path / "raw"))
    for name, column in values.items():
        table = tmp_path / name
        for number in range(4):
            write_deltalake(
                str(table), pa.table({name: column, "n": [number, -number]}), mode="append", partition_by=[name]
            )
        before = pl.read_delta(str(table)).sort("n", name).to_dicts()
        assert join_small_files(str(table), Compaction(target_bytes=1 << 20, min_files=2)).files == 8, name
        assert repr(pl.read_delta(str(table)).sort("n", name).to_dicts()) == repr(before), name


def test_statistics_tell_which_files_need_not_be_opened(tmp_path: Path) -> None:
    table = str(tmp_path / "t")
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    for number in range(5):
        times = [start + dt.timedelta(days=number, microseconds=n * 999) for n in range(10)]
        rows = {"n": list(range(10 * number, 10 * number + 10)), "at": times, "word": [f"w{number}"] * 10}
        rows["none"] = [None] * 10 if number < 4 else [1] * 10
        typed = pa.table(rows, schema=pa.schema(
            [("n", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("word", pa.string()), ("none", pa.int64())]
        ))  # fmt: skip
        write_deltalake(table, typed, mode="append")
    files = files_of(DeltaTable(table), table)

    def count(*where: Any) -> int:
        return len(files_that_may_match(files, where))

    assert count() == 5
    assert (count(("n", "=", 25)), count(("n", ">=", 30)), count(("n", "<", 10)), count(("n", ">", 99))) == (1, 2, 1, 0)
    assert count(("n", ">", 9), ("n", "<=", 20)) == 2
    assert count(("word", "=", "w3")) == 1
    assert count(("none", "=", 1)) == 1  # those that hold nothing but nulls are passed
    assert count(("at", ">=", start + dt.timedelta(days=3, microseconds=8991))) == 2  # the log knows milliseconds
    assert count(("payload", "=", b"x")) == 5  # nothing is known of it
    for operator in ("=", "<", "<=", ">", ">="):  # of another type: Spark casts it, or says what is wrong
        assert count(("n", operator, "text")) == count(("at", operator, "2026-01-01")) == 5
        assert count(("at", operator, start.replace(tzinfo=None))) == 5  # whose zone is not said
    with pytest.raises(OptionsError, match="use one of"):
        count(("n", "like", "x"))


def test_a_file_is_left_out_only_where_spark_would_find_nothing_in_it(tmp_path: Path) -> None:
    table, nan = str(tmp_path / "t"), float("nan")
    for number, values in enumerate(([1.0, nan], [3.0, 4.0], [nan, nan])):
        rows = pa.table({"x": values, "note": [f"n{number}", "say and n = 9 and stop"], "n": [number, number]})
        write_deltalake(table, rows, mode="append")
    files = files_of(DeltaTable(table), table)

    def count(*where: Any) -> int:
        return len(files_that_may_match(files, where))

    # To Spark NaN is itself and larger than any other number; statistics know nothing of it.
    assert (count(("x", ">", 5.0)), count(("x", ">=", 5)), count(("x", "=", nan))) == (3, 3, 3)
    assert (count(("x", "<", nan)), count(("x", "<=", nan)), count(("x", ">=", nan))) == (3, 3, 3)
    assert count(("x", "<", 2.0)) == 2  # of the file of nothing but NaN the statistics say nothing
    for sql in (
        "note = 'say and n = 9 and stop'",
        'note = "say and n = 9 and stop"',
        r"note = 'it\'s and n = 9 and it\'s'",
        "n = 1 /* and n = 9 and n = 8 */",
        "n = 1 -- and n = 9",
    ):
        assert count(*conditions_in(sql)) == 3, sql
    assert conditions_in("n = 1 and note = 'it'") == [("n", "=", 1), ("note", "=", "it")]


def test_many_small_files_become_one_of_few_row_groups(tmp_path: Path) -> None:
    table = tmp_path / "t"
    for number in range(20):
        write_deltalake(str(table), pa.table({"n": list(range(10 * number, 10 * number + 10))}), mode="append")
    done = join_small_files(str(table), Compaction(target_bytes=1 << 20))
    assert (done.files, done.into) == (20, 1)
    (file,) = files_of(DeltaTable(str(table)), str(table))
    assert pq.read_metadata(file.path).num_row_groups == 1
    assert sorted(pl.read_delta(str(table))["n"]) == list(range(200))


def test_the_cost_of_joining_files_grows_with_their_number_and_not_with_its_square(tmp_path: Path) -> None:
    def calls(count: int) -> int:
        table, files = tmp_path / str(count), []
        table.mkdir()
        for number in range(count):
            pq.write_table(pa.table({"n": [number]}), table / f"{number}.parquet")
            size = (table / f"{number}.parquet").stat().st_size
            files.append(DataFile(f"{number}.parquet", size, 1, '{"numRecords": 1}'))
        commit_files(str(table), "app", 0, files, pa.schema([("n", pa.int64())]))
        counted = 0

        def count_call(frame: Any, event: str, _: Any) -> None:
            nonlocal counted
            counted += event == "call" and frame.f_code.co_filename == compaction.__file__

        sys.setprofile(count_call)
        try:
            assert join_small_files(str(table)).files == count
        finally:
            sys.setprofile(None)
        assert rows_of(table) == list(range(count))
        return counted

    assert calls(120) < 8 * calls(30)


def test_a_file_that_is_too_much_for_the_budget_does_not_keep_others_from_being_joined() -> None:
    for large, budget, least in ((15, 10, 5), (9, 20, 8)):
        files = [TableFile("large", size=large, modified_ms=0)]
        files += [TableFile(f"{number}", size=2, modified_ms=1 + number) for number in range(30)]
        (group,) = choose(files, Compaction(target_bytes=100, budget_bytes=budget, min_files=least), 100)
        assert [file.path for file in group] == [f"{number}" for number in range(budget // 2)]
    assert choose(files[:4], Compaction(target_bytes=100, budget_bytes=10, min_files=5), 100) == []


def test_files_of_more_than_a_gibibyte_are_made_of_any_that_are_small_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_files(tmp_path / "t", 1)
    plans: list[Compaction] = []

    def note(table: str, plan: Compaction) -> compaction.Joined:
        plans.append(plan)
        return compaction.join_small_files(table, plan)

    monkeypatch.setattr(compacting, "join_small_files", note)
    compact(str(tmp_path / "t"), target_bytes=2 << 30)
    files = [TableFile(f"{number}", size=(1 << 30) - 1 - number, modified_ms=number) for number in range(4)]
    assert [len(group) for group in choose(files, plans[0], 100)] == [3]  # nothing is left of the budget


def test_a_vacuum_of_less_than_a_week_is_refused_unless_it_is_insisted_on(tmp_path: Path) -> None:
    small_files(tmp_path / "t", 3)
    with pytest.raises(OptionsError, match=r"at least 168, or --vacuum-anyway"):
        compact(str(tmp_path / "t"), vacuum_hours=167)
    assert compact(str(tmp_path / "t"), vacuum_hours=168)["removed"] == 0
    small_files(tmp_path / "t", 9, 3)
    assert compact(str(tmp_path / "t"), vacuum_hours=0, vacuum_anyway=True)["removed"] > 0
    assert rows_of(tmp_path / "t") == list(range(12))
