"""Law: whatever grows, appears or rolls between batches, and whatever the limits, a stream reads every record once."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings, strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import BinaryType, StringType, StructType

from penstock.log.xchannel import Writer
from penstock.spark.source.table import PenstockSource

SCHEMA = StructType().add("channel", StringType()).add("payload", BinaryType())
APPEND = st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.integers(0, 900))
LIMIT = st.one_of(
    st.just(ReadAllAvailable()),
    st.builds(ReadMaxRows, st.integers(1, 50)),
    st.builds(ReadMaxBytes, st.integers(1, 9000)),
)
STEPS = st.lists(st.one_of(APPEND, LIMIT), min_size=1, max_size=14)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, roll_bytes=st.sampled_from([0, 9000]), partition_bytes=st.sampled_from(["1", "10000", "128m"]))
def test_a_stream_reads_every_record_once(
    steps: list[tuple[str, int, int] | ReadLimit], roll_bytes: int, partition_bytes: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = {"path": folder, "partitionBytes": partition_bytes}
        reader = PenstockSource(options).streamReader(SCHEMA)
        at = reader.initialOffset()
        written: dict[str, list[bytes]] = {}
        read: dict[str, list[bytes]] = {}
        batches = []
        for step in [*steps, ReadAllAvailable(), ReadAllAvailable()]:
            if isinstance(step, tuple):
                name, count, size = step
                known = written.setdefault(name, [])
                fresh = [b"%d " % (len(known) + number) + b"." * size for number in range(count)]
                with Writer.open(Path(folder, name), region_bytes=4096, roll_bytes=roll_bytes) as writer:
                    writer.append_many(fresh)
                known += fresh
                continue
            end = json.loads(json.dumps(reader.latestOffset(at, step)))
            rows = [
                (row["channel"], row["payload"])
                for task in reader.partitions(at, end)
                for batch in reader.read(task)
                for row in batch.to_pylist()
            ]
            if isinstance(step, ReadMaxRows):
                assert len(rows) <= step.max_rows
            batches.append((at, end, rows))
            for name, payload in rows:
                read.setdefault(name, []).append(payload)
            at = end
        assert read == written
        # And every batch, replayed when all is there, is what it was.
        again = PenstockSource(options).streamReader(SCHEMA)
        for start, end, rows in batches:
            replayed = [
                (row["channel"], row["payload"])
                for task in again.partitions(start, end)
                for batch in again.read(task)
                for row in batch.to_pylist()
            ]
            assert replayed == rows
