"""Promise: a batch is its columns over one buffer, whichever way it is cut, and owns what it points into."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock.batch import Batch, Spans, UpdateBatch, payload_text
from penstock.errors import OptionsError
from penstock.log.xchannel import Reader, Writer, cleanup
from penstock.types import KvUpdate, Op


def batch(count: int = 6) -> Batch:
    names = [b"n%d" % n for n in range(count)]
    made = Batch.of(
        [b"%d" % n * (n * 5) for n in range(count)],
        positions=[100 + 10 * n for n in range(count)],
        timestamps=[2**63 + n for n in range(count)],
        kinds=[65535 - n for n in range(count)],
    )
    sizes = np.array([len(name) for name in names], np.int64)
    offsets = np.cumsum(sizes) - sizes + len(made.buffer)
    return Batch(
        made.buffer + b"".join(names),
        made.positions,
        made.payloads,
        timestamps=made.timestamps,
        kinds=made.kinds,
        extra={"name": Spans(offsets, sizes), "weight": np.arange(count, dtype=np.uint8)},
        next_position=999,
    )


def test_a_record_is_the_row_of_its_columns() -> None:
    record = batch()[2]
    assert (record.position, record.timestamp_ns, record.kind) == (120, 2**63 + 2, 65533)
    assert bytes(record.payload) == b"2" * 10
    assert record.extra is not None
    assert (bytes(record.extra["name"]), record.extra["weight"]) == (b"n2", 2)  # type: ignore[call-overload]
    assert batch()[-1] == batch()[5]
    for wrong in (6, -7):
        with pytest.raises(IndexError, match=f"record {wrong} of a batch of 6"):
            batch()[wrong]


def test_iteration_gives_what_indexing_gives() -> None:
    assert list(batch()) == [batch()[index] for index in range(6)]
    assert list(reversed(batch())) == [batch()[index] for index in range(5, -1, -1)]


@pytest.mark.parametrize(
    "part",
    [slice(None), slice(0, 3), slice(2, 4), slice(4, None), slice(None, None, -1), slice(5, 1, -2), slice(3, 3),
     slice(None, None, 2), slice(-2, None)],
)  # fmt: skip
def test_a_slice_is_the_list_of_its_records_in_either_direction(part: slice) -> None:
    whole = batch()
    cut = whole[part]
    assert list(cut) == list(whole)[part]
    assert cut.to_payloads() == whole.to_payloads()[part]
    assert cut.to_pylist() == whole.to_pylist()[part]
    assert cut.buffer is whole.buffer
    assert cut.to_arrow().to_pylist() == whole.to_arrow().to_pylist()[part]


def test_reading_goes_on_behind_the_last_record_of_a_slice() -> None:
    whole = batch()
    assert whole.next_position == 999
    assert whole[:2].next_position == 120
    assert whole[:2][:1].next_position == 110
    assert whole[2:].next_position == 999
    assert whole[::-1].next_position == 999
    assert whole[1::-1].next_position == 120
    assert whole[3:3].next_position == 999


def test_a_filter_keeps_rows_and_goes_on_behind_all_of_them() -> None:
    kept = batch().filter(np.array([True, False, False, True, False, False]))
    assert [record.position for record in kept] == [100, 130]
    assert kept.next_position == 999
    assert kept.extra["weight"].tolist() == [0, 3]  # type: ignore[union-attr]
    assert len(batch().filter(np.zeros(6, bool))) == 0


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(OptionsError, match="differ in length"):
        Batch.of([b"a"], kinds=[1, 2])
    with pytest.raises(OptionsError, match="differ in length"):
        Spans(np.zeros(1, np.int64), np.zeros(2, np.int64))


def test_arrow_with_and_without_a_copy_says_the_same() -> None:
    views, copies = batch().to_arrow(), batch().to_arrow(view=False)
    assert views.to_pylist() == copies.to_pylist()
    assert views.schema.field("payload").type == pa.binary_view()
    assert copies.schema.field("payload").type == pa.binary()
    assert copies.schema.field("name").type == pa.binary()
    assert views.schema.names == ["position", "timestamp", "timestamp_ns", "kind", "name", "weight", "payload"]
    views.validate(full=True)
    copies.validate(full=True)


def test_times_past_2262_have_no_date_but_keep_their_bits() -> None:
    arrow = Batch.of([b""] * 4, timestamps=[0, 1_700_000_000_123_456_789, 2**63, 2**64 - 1]).to_arrow()
    assert arrow.column("timestamp").is_null().to_pylist() == [False, False, True, True]
    assert arrow.column("timestamp").type == pa.timestamp("us", "UTC")
    assert arrow.column("timestamp").cast(pa.int64()).to_pylist()[:2] == [0, 1_700_000_000_123_456]
    found = np.array(arrow.column("timestamp_ns").to_pylist(), np.int64).view(np.uint64)
    assert found.tolist() == [0, 1_700_000_000_123_456_789, 2**63, 2**64 - 1]


def test_a_batch_without_times_and_kinds_has_nulls() -> None:
    arrow = Batch.of([b"a"]).to_arrow()
    assert arrow.column("timestamp").null_count == arrow.column("kind").null_count == 1
    record = Batch.of([b"a"])[0]
    assert record.timestamp_ns is record.kind is None


def test_an_empty_batch_is_one_too() -> None:
    for empty in (Batch.of([]), batch()[:0]):
        assert (len(empty), list(empty), empty.to_payloads(), empty.to_pylist()) == (0, [], [], [])
        assert empty.to_arrow().num_rows == empty.to_arrow(view=False).num_rows == 0
    assert repr(Batch.of([])) == "<Batch of 0 records>"
    assert repr(batch()) == "<Batch of 6 records from 100 to 150>"


def test_spans_outside_the_buffer_are_refused_and_not_read() -> None:
    for offset, length in ((0, 9), (8, 1), (-1, 2), (0, -1), (2**62, 2**62)):
        wrong = Batch(b"12345678", np.zeros(1, np.int64), Spans(np.array([offset]), np.array([length])))
        for use in (wrong.to_payloads, wrong.to_pylist, wrong.to_arrow, lambda: wrong.to_arrow(view=False)):  # noqa: B023
            with pytest.raises((ValueError, OptionsError)):
                use()


def test_payloads_survive_the_batch_the_log_and_the_file(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "chan", region_bytes=4096) as writer:
        writer.append_many([b"one" * 10, b"two" * 10])
    with Reader.open(tmp_path / "chan") as reader:
        read = reader.read_batch()
    view, record, arrow, part = read.payload(0), read[1], read.to_arrow().column("payload"), read[1:]
    del read, reader
    cleanup(tmp_path / "chan")
    gc.collect()
    assert bytes(view) == b"one" * 10
    assert bytes(record.payload) == b"two" * 10
    assert arrow.to_pylist() == [b"one" * 10, b"two" * 10]
    assert part.to_payloads() == [b"two" * 10]
    with pytest.raises(TypeError):
        view[0] = 1  # what was read cannot be changed


def test_an_update_batch_is_the_list_of_its_updates() -> None:
    updates = [
        KvUpdate.put("a", b"1", 1), KvUpdate.delete("ü", 2), KvUpdate.purge("c"), KvUpdate.put("", b"", 2**64 - 1),
    ]  # fmt: skip
    made = UpdateBatch.of(updates)
    assert list(made) == updates
    assert list(made[::-1]) == updates[::-1]
    assert list(made[1:3]) == updates[1:3]
    assert made[-1] == updates[-1]
    with pytest.raises(IndexError):
        made[4]
    assert made.to_pylist()[1] == {"op": "delete", "key": "ü", "value": b"", "version": updates[1].version.raw}
    assert made.to_arrow().to_pylist() == made.to_arrow(view=False).to_pylist()
    assert made.to_arrow().column("op").to_pylist() == [Op.PUT, Op.DELETE, Op.PURGE, Op.PUT]
    assert repr(made) == "<UpdateBatch of 4 updates>"
    assert len(UpdateBatch.of([])) == 0


def test_text_is_text_and_the_rest_is_base_64() -> None:
    assert payload_text(memoryview("käse".encode())) == ("payload", "käse")
    assert payload_text(b"\xff\xfe") == ("payload_base64", "//4=")
    assert payload_text(b"") == ("payload", "")
