"""The lake when two drivers, two queries, a vacuum or another schema come in between; without a JVM."""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from pyspark.sql.types import StructType

from penstock.errors import ConflictError, CorruptionError, OptionsError, UnsupportedError
from penstock.log.envelope import CONTENT
from penstock.log.xchannel import Writer
from penstock.spark.lake import compaction, table as lake
from penstock.spark.lake.compaction import Compaction, join_small_files
from penstock.spark.lake.features import inside
from penstock.spark.lake.reading import read, table_at
from penstock.spark.lake.table import (
    DataFile,
    commit_files,
    committed_batch,
    data_files,
    is_due,
    open_table,
    table_columns,
)
from penstock.spark.pipelines.compact import compact
from penstock.spark.pipelines.run import fit_table
from penstock.spark.source.columns import BASE, ENVELOPE, arrow_schema
from penstock.spark.source.export import delta_stats
from penstock.spark.source.table import ExportSource

NUMBERS = pa.schema([("n", pa.int64())])


def write(table: Path, name: str, schema: pa.Schema = NUMBERS, **columns: list[Any]) -> DataFile:
    """Write a file as a task does: in the table's folder, and no part of it yet."""
    table.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns, schema=schema), table / name)
    metadata = pq.read_metadata(table / name)
    return DataFile(name, (table / name).stat().st_size, metadata.num_rows, delta_stats(metadata))


def rows(table: Path, column: str = "n") -> list[Any]:
    found = open_table(str(table))
    assert found is not None
    return sorted(found.to_pyarrow_table().column(column).to_pylist())


def test_queries_that_filter_the_same_spans_do_not_write_each_others_files(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "ticks") as writer:
        writer.append_many([b"%d" % n for n in range(100)], kind=[n % 2 for n in range(100)])
    table, schema = tmp_path / "lake", arrow_schema(BASE)
    for kind in ("0", "1"):
        told = {"path": str(tmp_path / "ticks"), "table": str(table), "kinds": kind, "app": f"kind-{kind}"}
        reader = ExportSource(told).reader(None)  # type: ignore[arg-type]
        found = [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]
        commit_files(str(table), f"kind-{kind}", 0, data_files(found), schema)
    assert sorted(map(int, rows(table, "payload"))) == list(range(100))


def test_a_batch_that_two_drivers_commit_at_once_is_committed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "lake"
    commit_files(str(table), "app", 0, [write(table, "a", n=[0])], NUMBERS)
    real, opened = lake.open_table, 0

    def open_and_be_overtaken(path: str) -> DeltaTable | None:
        nonlocal opened
        opened += 1
        found = real(path)
        if opened == 1:  # a driver that was believed dead
            assert commit_files(path, "app", 1, [write(table, "b", n=[1])], NUMBERS)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(lake, "open_table", open_and_be_overtaken)
        assert commit_files(str(table), "app", 1, [write(table, "c", n=[1])], NUMBERS) is False
    assert rows(table) == [0, 1]


def test_a_batch_is_committed_although_another_writer_has_changed_the_columns_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "lake"
    commit_files(str(table), "app", 0, [write(table, "a", n=[0])], NUMBERS, query="q")
    real, turns = lake.open_table, 0

    def open_and_be_overtaken(path: str) -> DeltaTable | None:
        nonlocal turns
        found, turns = real(path), turns + 1
        if turns % 2 and turns < 6:
            write_deltalake(path, pa.table({"n": [10], f"more{turns}": [1]}), mode="append", schema_mode="merge")
        return found

    monkeypatch.setattr(lake, "open_table", open_and_be_overtaken)
    assert commit_files(str(table), "app", 1, [write(table, "b", n=[1])], NUMBERS, query="q")
    monkeypatch.undo()
    assert not commit_files(str(table), "app", 1, [write(table, "c", n=[1])], NUMBERS, query="q")
    assert rows(table) == [0, 1, 10, 10, 10]


@pytest.mark.parametrize("other", ["same", "another"])
def test_columns_are_added_to_a_table_to_which_another_adds_them_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    table = tmp_path / "lake"
    commit_files(str(table), "app", 0, [write(table, "a", n=[0])], NUMBERS)
    frame = SimpleNamespace(columns=["n", "same"], schema=StructType().add("n", "long").add("same", "long"))
    real = lake.open_table

    def open_and_be_overtaken(path: str) -> DeltaTable | None:
        monkeypatch.undo()
        found = real(path)
        write_deltalake(path, pa.table({"n": [1], other: [1]}), mode="append", schema_mode="merge")
        return found

    monkeypatch.setattr("penstock.spark.lake.open_table", open_and_be_overtaken)
    fit_table(frame, str(table))  # type: ignore[arg-type]
    names = {"n", "same", other}
    assert {field.name for field in DeltaTable(str(table)).schema().fields} == names
    monkeypatch.setattr(lake, "open_table", open_and_be_overtaken)
    other, wide = f"{other} again", pa.schema([("n", pa.int64()), ("same again", pa.int64())])
    part = write(table, "b", wide, **{"n": [5], "same again": [6]})
    assert commit_files(str(table), "app", 1, [part], wide)
    assert {field.name for field in DeltaTable(str(table)).schema().fields} == names | {"same again", other}
    assert rows(table) == [0, 1, 1, 5]


def test_a_commit_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CommitFailedError("Failed to commit transaction: no room")

    table = tmp_path / "lake"
    commit_files(str(table), "app", 0, [write(table, "a", n=[0])], NUMBERS)
    monkeypatch.setattr(DeltaTable, "create_write_transaction", fail)
    with pytest.raises(ConflictError, match="it could not be committed: Failed to commit transaction: no room"):
        commit_files(str(table), "app", 1, [write(table, "b", n=[1])], NUMBERS)


@pytest.mark.parametrize("other", ["replaces", "appends", "joins"])
def test_a_table_that_is_replaced_beside_others_holds_nothing_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    table = tmp_path / "lake"
    for number in (0, 1):
        commit_files(str(table), "app", number, [write(table, str(number), n=[number])], NUMBERS)
    real = lake.open_table

    def open_and_be_overtaken(path: str) -> DeltaTable | None:
        monkeypatch.setattr(lake, "open_table", real)
        found = real(path)
        if other == "joins":
            assert join_small_files(path, Compaction(min_files=2)).files == 2
        elif other == "appends":
            commit_files(path, "app", 2, [write(table, "c", n=[2])], NUMBERS)
        else:
            replace_with(path, "other", [5])
        return found

    def replace_with(path: str, app: str, numbers: list[int]) -> None:
        lake.replace_files(path, app, [write(table, app, n=numbers)], NUMBERS, ())

    monkeypatch.setattr(lake, "open_table", open_and_be_overtaken)
    replace_with(str(table), "mine", [7])
    assert rows(table) == [7]


def test_two_queries_of_one_name_do_not_swallow_each_others_batches(tmp_path: Path) -> None:
    table = tmp_path / "lake"
    for batch in (0, 1):
        commit_files(str(table), "app", batch, [write(table, f"a{batch}", n=[batch])], NUMBERS, query="0a")
    assert not is_due(str(table), "app", 1, "0a")
    assert is_due(str(table), "app", 2, "0a")
    for batch in (0, 1, 2):
        with pytest.raises(ConflictError, match="of another query, or its checkpoint was made again"):
            is_due(str(table), "app", batch, "0b")
        with pytest.raises(ConflictError, match="of another query"):
            commit_files(str(table), "app", batch, [], NUMBERS, query="0b")
    assert is_due(str(table), "app", 2, "")  # a checkpoint that cannot be read tells nothing
    assert rows(table) == [0, 1]


def test_a_stream_whose_table_is_gone_does_not_go_on_in_the_middle(tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="batch 3 of app is here, but not batch 0"):
        is_due(str(tmp_path / "lake"), "app", 3, "0a")
    assert is_due(str(tmp_path / "lake"), "app", 0, "0a")


def test_columns_that_come_later_are_added_and_other_types_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "lake"
    commit_files(str(table), "app", 0, [write(table, "a", n=[0])], NUMBERS)
    wider = pa.schema([("m", pa.string()), ("n", pa.int64())])
    assert commit_files(str(table), "app", 1, [write(table, "b", wider, n=[1], m=["x"])], wider)
    assert commit_files(str(table), "app", 2, [write(table, "c", n=[2])], NUMBERS)
    found = DeltaTable(str(table)).to_pyarrow_table().sort_by("n").to_pylist()
    assert found == [{"n": 0, "m": None}, {"n": 1, "m": "x"}, {"n": 2, "m": None}]
    other = pa.schema([("n", pa.string())])
    with pytest.raises(OptionsError, match="column n is long there, not string"):
        commit_files(str(table), "app", 3, [write(table, "d", other, n=["3"])], other)
    assert rows(table) == [0, 1, 2]


def test_the_table_of_channels_keeps_columns_of_others_and_refuses_other_types(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "ticks", content=CONTENT):
        pass
    own = pa.schema([("position", pa.int64()), ("day", pa.date32())])
    table = tmp_path / "lake"
    commit_files(str(table), "app", 0, [write(table, "a", own, position=[0], day=[dt.date(2026, 1, 1)])], own)
    columns = table_columns(str(tmp_path / "ticks"), str(table))
    assert {column.name for column in columns} == {column.name for column in (*BASE, *ENVELOPE)}
    assert {field.name for field in DeltaTable(str(table)).schema().fields} == {"day", *(c.name for c in columns)}
    wrong = tmp_path / "wrong"
    text = pa.schema([("position", pa.string())])
    commit_files(str(wrong), "app", 0, [write(wrong, "a", text, position=["0"])], text)
    with pytest.raises(OptionsError, match="column position is string there, not long"):
        table_columns(str(tmp_path / "ticks"), str(wrong))


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_file_that_is_gone_before_its_commit_does_not_break_the_table(tmp_path: Path, harm: str) -> None:
    table = tmp_path / "lake"
    commit_files(str(table), "app", 0, [write(table, "a.parquet", n=[0])], NUMBERS)
    files = [write(table, "b.parquet", n=[1])]
    if harm == "gone":
        compact(str(table), vacuum_hours=0, vacuum_anyway=True)  # fewer hours than the batch takes
    else:
        os.truncate(table / "b.parquet", 10)
    with pytest.raises(CorruptionError, match=r"b\.parquet"):
        commit_files(str(table), "app", 1, files, NUMBERS)
    assert commit_files(str(table), "app", 1, [write(table, "b.parquet", n=[1])], NUMBERS)
    assert rows(table) == [0, 1]


@pytest.mark.parametrize("name", ["a b", "50%", "ha#sh", "qu?x", "br[1]{2}*", "day=5", "ü", "_x", "co:lon"])
def test_a_table_may_have_any_name(tmp_path: Path, name: str) -> None:
    table = tmp_path / name
    for batch in (0, 1):
        commit_files(str(table), "app", batch, [write(table, f"{batch}.parquet", n=[batch])], NUMBERS)
    assert committed_batch(str(table), "app") == 1
    assert compact(str(table), vacuum_hours=0, vacuum_anyway=True)["removed"] == 2
    assert rows(table) == [0, 1]
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["per%20cent", "back\\slash"])
def test_a_name_that_cannot_be_a_table_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionsError, match="for another character"):
        commit_files(str(tmp_path / name), "app", 0, [], NUMBERS)
    assert os.listdir(tmp_path) == []


def test_numbers_that_json_does_not_have_are_left_out_of_the_statistics(tmp_path: Path) -> None:
    schema = pa.schema([("x", pa.float64()), ("n", pa.int64()), ("local", pa.timestamp("us"))])
    moment = dt.datetime(2026, 7, 1, 12)  # noqa: DTZ001  # without a zone: which moment it is depends on who reads
    file = write(tmp_path, "a", schema, x=[1.0, float("inf")], n=[1, 2], local=[moment, moment])

    def refuse(text: str) -> None:
        raise AssertionError(text)

    stats = json.loads(file.stats, parse_constant=refuse)
    assert (stats["minValues"], stats["maxValues"]) == ({"n": 1}, {"n": 2})


@pytest.mark.parametrize(
    ("column", "bounds"),
    [
        (pa.array([568_971_820_800_000_000, 1], pa.timestamp("us", "UTC")), None),  # the year 20,000
        (pa.array([-62_135_596_800_000_001, 1], pa.timestamp("us", "UTC")), None),  # before the year 1
        (pa.array([253_402_300_799_999_999], pa.timestamp("us", "UTC")), None),  # what stands for "for ever"
        (pa.array([568_971_820_800_000_000], pa.timestamp("us")), None),
        (pa.array([10_000_000, -10_000_000], pa.date32()), None),
        (
            pa.array([-62_135_596_800_000_000, 253_402_300_799_999_000], pa.timestamp("us", "UTC")),
            ("0001-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z"),
        ),
    ],
)
def test_times_out_of_reach_are_left_out_of_the_statistics(
    tmp_path: Path, column: pa.Array, bounds: tuple[str, str] | None
) -> None:
    pq.write_table(pa.table({"at": column, "n": [7] * len(column)}), tmp_path / "a.parquet")
    found = json.loads(delta_stats(pq.read_metadata(tmp_path / "a.parquet")))
    assert found["maxValues"]["n"] == 7
    assert (found["minValues"].get("at"), found["maxValues"].get("at")) == (bounds or (None, None))


def test_compacting_goes_by_times_only_and_leaves_what_is_appended_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "lake"
    schema = pa.schema([("n", pa.int64()), ('event "Time"', pa.timestamp("us", "UTC"))])

    def add(batch: int, days: int) -> None:
        when = dt.datetime.now(dt.UTC) - dt.timedelta(days=days)
        file = write(table, f"{batch}.parquet", schema, **{"n": [batch], 'event "Time"': [when]})
        commit_files(str(table), "app", batch, [file], schema, query="0a")

    for batch, days in enumerate((30, 20, 1, 0)):
        add(batch, days)
    for column in ("n", "nothing"):
        with pytest.raises(OptionsError, match=f"no column {column} of times"):
            compact(str(table), keep_days=10, time_column=column)

    real = compaction._join

    def join(*given: Any) -> Any:
        monkeypatch.undo()
        add(4, 0)
        return real(*given)

    monkeypatch.setattr(compaction, "_join", join)
    (table / "_checkpoint").mkdir()
    (table / "_checkpoint" / "metadata").write_text("{}")
    (table / "9.parquet.0.tmp").write_text("left by a task that was killed")
    assert compact(str(table), keep_days=365_000, time_column='event "Time"')["deleted_rows"] == 0
    for days in (-1, float("nan"), 1e6, 1e12):
        with pytest.raises(OptionsError, match="must be between 0 and 365,000"):
            compact(str(table), keep_days=days, time_column='event "Time"')
    done = compact(str(table), keep_days=10, time_column='event "Time"', vacuum_hours=0, vacuum_anyway=True)
    assert done["deleted_rows"] == 2
    assert rows(table) == [2, 3, 4]
    assert committed_batch(str(table), "app@0a") == 4
    assert (table / "_checkpoint" / "metadata").exists()
    assert not (table / "9.parquet.0.tmp").exists()


def foreign(table: Path, *, protocol: dict[str, Any] | None = None, **metadata: Any) -> None:
    """Make a table and let its log say what another writer would have said."""
    commit_files(str(table), "app", 0, [write(table, "a.parquet", n=[0])], NUMBERS)
    log = table / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "protocol" in action and protocol:
            action["protocol"] = protocol
        if "metaData" in action:
            action["metaData"] |= metadata
    log.write_text("".join(json.dumps(action) + "\n" for action in actions))


def listing(*features: str) -> dict[str, Any]:
    names = list(features)
    return {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": names, "writerFeatures": names}


def fields(metadata: dict[str, Any]) -> str:
    """Return a schema, in an array of which a field has this metadata."""
    inner = {"name": "n", "type": "long", "nullable": True, "metadata": metadata}
    many = {"type": "array", "elementType": {"type": "struct", "fields": [inner]}, "containsNull": True}
    held = [{**inner, "metadata": {}}, {"name": "many", "type": many, "nullable": True, "metadata": {}}]
    return json.dumps({"type": "struct", "fields": held})


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"protocol": listing("deletionVectors")}, "it uses deletionVectors"),
        ({"protocol": listing("columnMapping")}, "it uses columnMapping"),
        ({"configuration": {"delta.enableChangeDataFeed": "true"}}, "it uses changeDataFeed"),
        ({"configuration": {"delta.columnMapping.mode": "name"}}, "it uses columnMapping"),
        ({"configuration": {"delta.constraints.positive": "n > 0"}}, "it uses checkConstraints"),
        (
            {"schemaString": fields({"delta.invariants": '{"expression": {"expression": "n > 0"}}'})},
            "it uses invariants",
        ),
        ({"schemaString": fields({"delta.generationExpression": "n + 1"})}, "it uses generatedColumns"),
        ({"protocol": listing("sparkle")}, "'sparkle' is not supported"),
        ({"protocol": {"minReaderVersion": 9, "minWriterVersion": 9}}, "reader version 9"),
        (
            {"protocol": listing("columnMapping"), "configuration": {"delta.columnMapping.mode": "name"}},
            "[Cc]olumn mapping",
        ),
    ],
)
def test_a_table_that_uses_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, told: dict[str, Any], reason: str
) -> None:
    table = tmp_path / "lake"
    foreign(table, **told)
    with pytest.raises(UnsupportedError, match=reason):
        open_table(str(table))
    with pytest.raises(UnsupportedError, match=reason):
        commit_files(str(table), "app", 1, [write(table, "b.parquet", n=[1])], NUMBERS)


def test_an_earlier_state_that_used_what_is_not_implemented_is_refused_though_the_table_no_longer_does(
    tmp_path: Path,
) -> None:
    foreign(tmp_path / "t", configuration={"delta.columnMapping.mode": "name"})
    log = tmp_path / "t" / "_delta_log"
    actions = [json.loads(line) for line in (log / f"{0:020d}.json").read_text().splitlines()]
    after = next(action for action in actions if "metaData" in action)
    after["metaData"]["configuration"] = {}
    (log / f"{1:020d}.json").write_text(json.dumps(after) + "\n")
    assert table_at(str(tmp_path / "t"), None, None).version() == 1
    with pytest.raises(UnsupportedError, match="columnMapping"):
        table_at(str(tmp_path / "t"), 0, None)


def test_a_table_whose_log_is_damaged_says_so_in_one_line(tmp_path: Path) -> None:
    foreign(tmp_path / "lake")
    (tmp_path / "lake" / "_delta_log" / f"{0:020d}.json").write_text("no json\n")
    with pytest.raises(CorruptionError, match="_delta_log") as failed:
        open_table(str(tmp_path / "lake"))
    assert "\n" not in str(failed.value)


def test_features_that_ask_nothing_are_no_reason_to_refuse_a_table(tmp_path: Path) -> None:
    older = {"minReaderVersion": 2, "minWriterVersion": 5}
    foreign(tmp_path / "older", protocol=older, configuration={"delta.enableChangeDataFeed": "false"})
    assert rows(tmp_path / "older") == [0]
    moments = pa.schema([("at", pa.timestamp("us"))])  # a time without a zone is a feature, and ours to write
    table = tmp_path / "moments"
    for batch in (0, 1):
        file = write(table, f"{batch}.parquet", moments, at=[0])
        assert commit_files(str(table), "app", batch, [file], moments)
    assert len(rows(table, "at")) == 2


def test_no_rows_are_taken_out_of_a_table_that_is_append_only(tmp_path: Path) -> None:
    schema = pa.schema([("timestamp", pa.timestamp("us", "UTC"))])
    for _ in range(3):
        one = pa.table({"timestamp": [0]}, schema=schema)
        write_deltalake(tmp_path / "t", one, mode="append", configuration={"delta.appendOnly": "true"})
    with pytest.raises(OptionsError, match=r"it is append-only \(delta\.appendOnly\)"):
        compact(str(tmp_path / "t"), keep_days=1)
    with pytest.raises(OptionsError, match="it is append-only"):
        lake.replace(None, str(tmp_path / "t"))  # type: ignore[arg-type]
    assert compact(str(tmp_path / "t"))["files_after"] == 1  # which takes none
    assert len(rows(tmp_path / "t", "timestamp")) == 3


@pytest.mark.parametrize("path", ["../a.parquet", "/etc/passwd", "file:///etc/passwd", "x/%2e%2e/../../a.parquet"])
def test_a_file_outside_of_its_table_is_refused_by_name(tmp_path: Path, path: str) -> None:
    with pytest.raises(CorruptionError, match="not in the table"):
        inside(str(tmp_path / "lake"), path)


@pytest.mark.parametrize("name", ["_a.parquet", "part=1/.a.parquet", "a.parquet._COPYING_"])
def test_a_file_that_spark_would_pass_over_in_silence_is_refused_by_name(tmp_path: Path, name: str) -> None:
    table = tmp_path / "lake"
    (table / "part=1").mkdir(parents=True)
    commit_files(str(table), "app", 0, [write(table, "_=a.parquet", n=[1]), write(table, name, n=[2])], NUMBERS)
    assert rows(table) == [1, 2]  # as delta-rs has it
    with pytest.raises(UnsupportedError, match=f"Spark reads no file of such a name: {name}"):
        read(None, str(table))  # type: ignore[arg-type]


def test_a_state_that_never_was_is_refused_in_one_line(tmp_path: Path) -> None:
    table = str(tmp_path / "t")
    write_deltalake(table, pa.table({"n": [1]}))
    for version in (-1, 1, 1 << 64):
        with pytest.raises(OptionsError, match="it cannot be read as it was"):
            table_at(table, version, None)
    for moment in ("yesterday", "1970-01-01", dt.date(1970, 1, 2), dt.datetime(1970, 1, 1, tzinfo=dt.UTC)):
        with pytest.raises(OptionsError, match=r"it cannot be read as it was|there was no table"):
            table_at(table, None, moment)
    tomorrow = dt.datetime.now(dt.UTC).date() + dt.timedelta(days=1)
    assert table_at(table, None, tomorrow).version() == table_at(table, None, "9999-12-31").version() == 0


@pytest.mark.parametrize("what", ["another table", "the checkpoint of a stream", "a log"])
def test_a_vacuum_leaves_what_else_is_in_the_folder_of_a_table(tmp_path: Path, what: str) -> None:
    table, inner = tmp_path / "t", tmp_path / "t" / "inner"
    commit_files(str(table), "app", 0, [write(table, "a.parquet", n=[0])], NUMBERS)
    (table / "_checkpoint" / "offsets").mkdir(parents=True)  # where it belongs
    (table / "_checkpoint" / "commits").mkdir()
    (table / "left.tmp").write_text("by a task that was killed")
    compact(str(table), vacuum_hours=0, vacuum_anyway=True)
    assert not (table / "left.tmp").exists()
    if what == "another table":
        commit_files(str(inner), "app", 0, [write(inner, "b.parquet", n=[1])], NUMBERS)
    elif what == "a log":
        inner.mkdir()
        with Writer.open(inner / "ticks") as writer:
            writer.append(b"x")
    else:
        for name in ("offsets", "commits"):
            (inner / name).mkdir(parents=True)
            (inner / name / "0").write_text("v1")
    before = sorted(inner.rglob("*"))
    with pytest.raises(OptionsError, match=f"in {inner} is {what}"):
        compact(str(table), vacuum_hours=0, vacuum_anyway=True)
    assert sorted(inner.rglob("*")) == before
    assert compact(str(table))["files_after"] == 1  # nothing is removed by that


def test_columns_that_differ_in_case_and_nulls_where_none_may_be_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "t"
    needed = pa.schema([pa.field("n", pa.int64(), nullable=False), ("Device", pa.string())])
    commit_files(str(table), "app", 0, [write(table, "0.parquet", needed, n=[0], Device=["a"])], needed)
    device = pa.schema([("n", pa.int64()), ("device", pa.string())])
    with pytest.raises(OptionsError, match="column device is called Device there"):
        commit_files(str(table), "app", 1, [write(table, "1.parquet", device, n=[1], device=["b"])], device)
    with pytest.raises(OptionsError, match=r"column n is not null there, and 2\.parquet has rows without it"):
        commit_files(str(table), "app", 1, [write(table, "2.parquet", n=[None, 1])], NUMBERS)
    other = pa.schema([("m", pa.int64())])
    with pytest.raises(OptionsError, match="column n is not null there"):
        commit_files(str(table), "app", 1, [write(table, "3.parquet", other, m=[1])], other)
    assert commit_files(str(table), "app", 1, [write(table, "4.parquet", n=[1])], NUMBERS)
    assert rows(table) == [0, 1]


def test_an_earlier_moment_is_told_by_the_commits_and_not_by_the_times_of_files(tmp_path: Path) -> None:
    table = tmp_path / "t"
    for number in range(3):
        commit_files(str(table), "app", number, [write(table, f"{number}.parquet", n=[number])], NUMBERS)
    times = [1_700_000_000_123 + 60_000 * number for number in range(3)]
    for number, time in enumerate(times):
        log = table / "_delta_log" / f"{number:020d}.json"
        actions = [json.loads(line) for line in log.read_text().splitlines()]
        for action in actions:
            if "commitInfo" in action:
                action["commitInfo"]["timestamp"] = time
        log.write_text("".join(json.dumps(action) + "\n" for action in actions))
    shutil.copytree(table, tmp_path / "copy", copy_function=shutil.copyfile)  # every file is new
    for number, time in enumerate(times):
        for later in (0, 59_999):
            assert table_at(str(tmp_path / "copy"), None, str(time + later)).version() == number
    with pytest.raises(OptionsError, match=r"there was no table: it begins at 2023-11-14T22:13:20\.123"):
        table_at(str(tmp_path / "copy"), None, str(times[0] - 1))
    DeltaTable(str(tmp_path / "copy")).create_checkpoint()
    (tmp_path / "copy" / "_delta_log" / f"{0:020d}.json").unlink()  # as others do with what is old
    with pytest.raises(OptionsError, match=r"what it was is not kept: its log begins at 2023-11-14T22:14:20\.123"):
        table_at(str(tmp_path / "copy"), None, str(times[0]))
