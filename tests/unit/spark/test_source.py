"""The batch source as a Python object: what it plans and reads, without a JVM."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.datasource import DataSourceReader

from penstock.batch import Batch, Spans
from penstock.errors import CorruptionError, OptionsError
from penstock.log.envelope import CONTENT, Envelope, encode_envelope, encode_headers
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer
from penstock.spark.source.columns import BASE, arrow_schema, columns_of_batch, pieces, to_record_batch
from penstock.spark.source.options import SourceOptions
from penstock.spark.source.table import PenstockSource
from penstock.types import Op

TYPES = {
    "string": T.StringType(), "bigint": T.LongType(), "long": T.LongType(), "timestamp": T.TimestampType(),
    "int": T.IntegerType(), "binary": T.BinaryType(), "array<int>": T.ArrayType(T.IntegerType()),
    "map<string,binary>": T.MapType(T.StringType(), T.BinaryType()),
}  # fmt: skip


def struct(ddl: str) -> T.StructType:
    """Read a simple schema; Spark's own parser needs a JVM."""
    pairs = (item.replace("`", "").split() for item in ddl.replace(", ", ";").split(";"))
    return T.StructType([T.StructField(name, TYPES[kind]) for name, kind in pairs])


FULL = struct(", ".join(column.ddl for column in BASE))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    with Writer.open(tmp_path / "ticks", region_bytes=4096) as writer:
        for number in range(500):
            writer.append(b"tick %d" % number, kind=number % 3, timestamp_ns=1_000_000_000 + number)
    with Writer.open(tmp_path / "state", content=CONTENT) as writer:
        writer.append(encode_envelope(Envelope(b"devices/7", b"on", op=Op.PUT, event_time_ns=5)))
        writer.append(encode_envelope(Envelope(b"devices/7", op=Op.DELETE)))
    return str(tmp_path)


def table(source: PenstockSource, schema: T.StructType = FULL) -> pa.Table:
    reader = source.reader(schema)
    reader = cloudpickle.loads(cloudpickle.dumps(reader))
    tasks = cloudpickle.loads(cloudpickle.dumps(reader.partitions()))
    return pa.Table.from_batches([batch for task in tasks for batch in reader.read(task)])


def test_every_record_of_every_channel_is_read_with_its_columns(folder: str) -> None:
    found = table(PenstockSource({"path": folder}))
    assert found.schema.equals(arrow_schema(BASE))
    rows = found.to_pylist()
    assert len(rows) == 502
    ticks = [row for row in rows if row["channel"] == "ticks"]
    assert ticks[7]["payload"] == b"tick 7"
    assert ticks[7]["timestamp_ns"] == 1_000_000_007
    assert ticks[7]["timestamp"].isoformat() == "1970-01-01T00:00:01+00:00"
    assert ticks[7]["kind"] == 1
    assert ticks[7]["key"] is None
    assert [row["position"] for row in ticks] == sorted(row["position"] for row in ticks)


def test_envelopes_are_opened_into_columns(folder: str) -> None:
    source = PenstockSource({"path": folder + "/state"})
    ddl = source.schema()
    assert ddl.endswith("`op` int, `flags` int, `event_time_ns` bigint, `headers` map<string,binary>")
    rows = table(source, struct(ddl)).to_pylist()
    assert [(row["key"], row["op"], row["event_time_ns"], row["payload"]) for row in rows] == [
        (b"devices/7", 0, 5, b"on"),
        (b"devices/7", 1, 0, b""),
    ]


def test_a_schema_chooses_the_columns_that_are_read(folder: str) -> None:
    found = table(PenstockSource({"path": folder}), struct("kind int, position long, seq long"))
    assert found.schema.names == ["kind", "position", "seq"]
    assert found.column("seq").null_count == 502  # message logs have it: one may come


def test_a_misspelt_column_is_refused_and_not_null(folder: str) -> None:
    with pytest.raises(OptionsError, match=r"no channel has a column paylod: is it payload\?"):
        PenstockSource({"path": folder}).reader(struct("paylod binary"))
    with pytest.raises(OptionsError, match="no channel has a column colour; there are channel, position"):
        PenstockSource({"path": folder}).streamReader(struct("colour string"))


def test_a_schema_with_a_wrong_type_is_refused(folder: str) -> None:
    for read in (PenstockSource({"path": folder}).reader, PenstockSource({"path": folder}).streamReader):
        with pytest.raises(OptionsError, match="a schema without a column"):
            read(T.StructType())  # Spark would count no rows at all
    with pytest.raises(OptionsError, match="payload is binary, not string"):
        PenstockSource({"path": folder}).reader(struct("payload string"))
    with pytest.raises(OptionsError, match="not a type that a log has"):
        PenstockSource({"path": folder}).reader(struct("more array<int>"))


@pytest.mark.parametrize(
    ("ddl", "reason"),
    [
        ("seq int", "column seq of numbered is bigint, not int"),
        ("from string", "column from of numbered is binary, not string"),
        ("op string", "column op is int, not string"),
        ("Payload binary", "column Payload: it is called payload"),
    ],
)
def test_a_column_that_a_format_adds_is_not_turned_into_another_type(tmp_path: Path, ddl: str, reason: str) -> None:
    with MessageLog.open(tmp_path / "numbered") as writer:
        writer.append(b"one", sender="ann@localhost")
    with pytest.raises(OptionsError, match=reason):
        table(PenstockSource({"path": str(tmp_path)}), struct(ddl))


def test_a_column_that_must_not_be_null_is_not_filled_with_nulls(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "numbered") as writer:
        writer.append(b"one")
    source = PenstockSource({"path": str(tmp_path)})
    whole = T.StructType([T.StructField("position", T.LongType(), nullable=False)])
    assert table(source, whole).to_pylist() == [{"position": 1}]
    with pytest.raises(OptionsError, match="column kind is not null in the schema, but has nulls in numbered"):
        table(source, T.StructType([T.StructField("kind", T.IntegerType(), nullable=False)]))


def test_options_leave_out_channels_kinds_and_positions_exactly(folder: str) -> None:
    options = {"channels": "ticks", "kinds": "2", "fromPosition": "9000", "toPosition": "12000"}
    rows = table(PenstockSource({"path": folder, **options})).to_pylist()
    everything = table(PenstockSource({"path": folder})).to_pylist()
    assert rows == [
        row for row in everything if row["channel"] == "ticks" and row["kind"] == 2 and 9000 <= row["position"] < 12_000
    ]
    assert 0 < len(rows) < 166
    assert len(table(PenstockSource({"path": folder, "channels": "st*, nothing*"}))) == 2


def test_no_reader_offers_to_take_sparks_filters(folder: str) -> None:
    # PySpark 4.3 would hand the filters of one query to the next: docs/decisions/123-filters.md
    assert type(PenstockSource({"path": folder}).reader(FULL)).pushFilters is DataSourceReader.pushFilters


def test_a_batch_is_cut_into_pieces_of_a_few_megabytes() -> None:
    batch = Batch.of([b"x" * 1000] * 5000 + [b"y" * 3_000_000] * 3)
    parts = list(pieces(batch, 1 << 20))
    assert [payload for part in parts for payload in part.to_payloads()] == batch.to_payloads()
    assert max(len(part) for part in parts) <= 1048
    assert [len(part) for part in parts[-3:]] == [1, 1, 1]


def test_what_a_format_adds_gets_a_type_spark_takes() -> None:
    plain = Batch.of([b"ab"])
    extra = {
        "seq": np.array([2**64 - 1], np.uint64),
        "level": np.array([7], np.uint8),
        "from": Spans(np.array([0]), np.array([1])),
    }
    batch = Batch(plain.buffer, plain.positions, plain.payloads, extra=extra)
    columns = columns_of_batch(batch)
    assert [(item.name, item.type) for item in columns] == [("seq", "bigint"), ("level", "int"), ("from", "binary")]
    assert to_record_batch(batch, "c", arrow_schema(columns)).to_pylist() == [{"seq": -1, "level": 7, "from": b"a"}]


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"path": "x", "start": "soon"},
        {"path": "x", "maxRecordsPerTrigger": "0"},
        {"path": "ftp://x/y"},
        {"path": "x", "failOnDataLoss": "maybe"},
        {"path": "x", "logFormat": "kafka"},
        {"paths": "["},
        {"path": "x", "kinds": "1,two"},
        {"path": "x", "fromPosition": "first"},
        {"path": "x", "channels": " , "},
        {"path": "x", "channels": "[]"},
        {"path": "x", "kinds": ""},
        {"path": "x", "cursor": "../up"},
        {"path": "x", "batchBytes": "2g"},
        {"path": ""},  # which is not the root of all files
        {"path": "file:"},
        {"paths": '["x", ""]'},
        {"path": "x", "kinds": "65536"},
        {"path": "x", "kinds": "-1"},
        {"path": "x", "kinds": "99999999999999999999"},
        {"path": "x", "maxBytesPerTrigger": "99999999999999999999"},
    ],
)
def test_a_contradiction_in_the_options_fails_at_once(bad: dict[str, str]) -> None:
    with pytest.raises(OptionsError):
        SourceOptions.of(bad)


def test_an_option_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(OptionsError, match="option maxrecordpertrigger is not known: is it maxRecordsPerTrigger"):
        SourceOptions.of({"path": "x", "maxRecordPerTrigger": "5"})
    with pytest.raises(OptionsError, match=r"option colour is not known; there are .*failOnDataLoss"):
        SourceOptions.of({"path": "x", "colour": "red"})


@pytest.mark.parametrize(
    ("option", "what"),
    [("start", "a stream"), ("cursor", "a stream"), ("maxRecordsPerTrigger", "a stream"), ("keyPrefix", "a fold")],
)
def test_an_option_that_does_not_apply_is_refused(folder: str, option: str, what: str) -> None:
    value = {"start": "latest", "maxRecordsPerTrigger": "1"}.get(option, "x")
    with pytest.raises(OptionsError, match=f"option {option} is not for a batch of logs: it is for {what}"):
        PenstockSource({"path": folder, option: value}).reader(FULL)
    with pytest.raises(OptionsError, match="option keyPrefix is not for a stream"):
        PenstockSource({"path": folder, "keyPrefix": "x"}).streamReader(FULL)


@pytest.mark.parametrize(
    ("stream", "options", "reason"),
    [
        (True, {"appld": "a", "checkpointLocation": "c"}, r"option appld is not known: is it appId\?"),
        (True, {"appId": "a", "batchId": "1"}, "option batchId is not for a stream into a log"),
        (True, {"appId": "a", "start": "latest"}, "option start is not for a stream into a log: it is for a stream"),
        (False, {"logformat": "queue", "buckt": "a"}, "option buckt is not known"),
        (False, {"appId": "a"}, "appId and batchId go together"),
        (False, {"batchId": "1"}, "appId and batchId go together"),
        (False, {"bucket": "b", "appId": "a"}, "option appId is not for a bucket"),
        (False, {"bucket": "b", "buckets": "a"}, r"option buckets is not known: is it bucket\?"),
    ],
)
def test_a_sink_refuses_options_that_are_not_known_or_do_not_apply(
    tmp_path: Path, stream: bool, options: dict[str, str], reason: str
) -> None:
    source = PenstockSource({"path": str(tmp_path / "out"), **options})
    schema = struct("key binary, payload binary")
    with pytest.raises(OptionsError, match=reason):
        (source.streamWriter if stream else source.writer)(schema, False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"minOffsetsPerTrigger": "10", "maxOffsetsPerTrigger": "5"}, "minOffsetsPerTrigger=10 is more than 5"),
        ({"startingTimestamp": "6000", "endingTimestamp": "5000"}, "endingTimestamp is before startingTimestamp"),
        ({"startingOffsets": '{"ticks": 152}', "endingOffsets": '{"ticks": 104}'}, "ticks would end at 104, before"),
        ({"fromPosition": "104", "toPosition": "80"}, "toPosition is before fromPosition"),
        ({"fromTime": "2026-01-02T00:00:00Z", "toTime": "2026-01-01T00:00:00Z"}, "toTime is before fromTime"),
    ],
)
def test_options_that_contradict_each_other_are_refused(folder: str, options: dict[str, str], reason: str) -> None:
    with pytest.raises(OptionsError, match=reason):
        PenstockSource({"path": folder, **options}).schema()


def test_what_spark_adds_to_the_options_is_let_through(folder: str) -> None:
    catalog = {"owner": "root", "provider": "penstock", "location": folder, "comment": "hi", "k": "a property"}
    twin = {"partitions": "2", "option.partitions": "2"}
    assert PenstockSource({"path": folder, **catalog, **twin}).schema()
    assert PenstockSource({"path": folder, "queryName": "q", "checkpointLocation": "c"}).reader(FULL)
    with pytest.raises(OptionsError, match=r"option partition is not known: is it partitions\?"):
        PenstockSource({"path": folder, **catalog, "partition": "2", "option.partition": "2"}).schema()


def test_channels_whose_names_have_commas_are_named_in_json() -> None:
    filters = SourceOptions.of({"path": "x", "channels": '["x,y", "site/*"]'}).filters
    assert [filters.channel_passes(name) for name in ("x,y", "x", "site/a")] == [True, False, True]


def test_options_have_no_case_and_sizes_have_units() -> None:
    options = SourceOptions.of({"PATHS": '["a", "b"]', "PartitionBytes": "64m", "start": '{"a": 5}'})
    here = os.getcwd()  # paths are made whole where the query is planned: tasks run in folders of their own
    assert (options.paths, options.partition_bytes, options.start) == ((f"{here}/a", f"{here}/b"), 64 << 20, {"a": 5})


def test_a_value_that_is_too_small_is_told_by_the_name_of_its_option() -> None:
    with pytest.raises(OptionsError, match="maxRecordsPerTrigger=0: must be at least 1"):
        SourceOptions.of({"path": "x", "maxRecordsPerTrigger": "0"})


def test_headers_are_a_map_and_bytes_where_they_are_asked_for_so(tmp_path: Path) -> None:
    headers = [{}, {"unit": b"C"}, {"a": b"", "ü": b"\xff\0"}]
    with Writer.open(tmp_path / "keyed", content=CONTENT) as writer:
        writer.append_many([encode_envelope(Envelope(b"k", b"v", headers=one)) for one in headers])
    for kind, expected in (
        (T.MapType(T.StringType(), T.BinaryType()), [list(one.items()) for one in headers]),
        (T.BinaryType(), [encode_headers(one) for one in headers]),
    ):
        reader = PenstockSource({"path": str(tmp_path / "keyed")}).reader(T.StructType().add("headers", kind))
        rows = [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]
        found = [row["headers"] for row in rows]
        assert found == expected
    with pytest.raises(OptionsError, match=r"headers is map<string,binary>, not map<string,string>"):
        PenstockSource({"path": str(tmp_path)}).reader(
            T.StructType().add("headers", T.MapType(T.StringType(), T.StringType()))
        )


def damaged(path: Path, kind: str) -> int:
    """Make a log that is damaged in its newest part; return how many records can be read."""
    if kind == "filechannel":
        with FileChannel.open(path, ChannelOptions(sync="always", compression="none")) as channel:
            positions = [channel.append(b"%02d" % number) for number in range(60)]
        file, at = path / "segment.0", 64 + positions[20] + 8
    elif kind == "messagelog":
        with MessageLog.open(path) as log:
            log.append_many([b"%02d" % number for number in range(60)])
        file = next(path.glob("*.log"))
        at = 20 * (file.stat().st_size // 60) + 23
    else:
        with Writer.open(path, region_bytes=4096) as writer:
            positions = [writer.append(b"%02d" % number + bytes(40)) for number in range(60)]
        file, at = path, positions[20]
    data = bytearray(file.read_bytes())
    data[at] = 0 if kind == "lost commit" else 0xEE
    file.write_bytes(data)
    return 20 if kind in ("xchannel", "lost commit") else 59


@pytest.mark.parametrize("tasks", ["1", "4"])
@pytest.mark.parametrize("kind", ["filechannel", "messagelog", "xchannel", "lost commit"])
def test_damage_in_the_newest_part_of_a_log_is_raised_or_passed_over(tmp_path: Path, kind: str, tasks: str) -> None:
    whole = damaged(tmp_path / "log", kind)
    options = {"path": str(tmp_path / "log"), "partitions": tasks, "partitionBytes": "4096"}
    with pytest.raises(CorruptionError):
        table(PenstockSource(options))
    assert table(PenstockSource(options | {"failOnDataLoss": "false"})).num_rows == whole
