"""Promise: the compiled kernel and its twin agree on any bytes and any history."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from penstock.batch import Spans, UpdateBatch
from penstock.kernel import foldindex, pgss
from penstock.kernel.twin import foldindex as twin_foldindex, pgss as twin_pgss
from penstock.store.pgss import HEADER, cursor_record
from penstock.types import KvUpdate, Op, VersionToken

BOTH = pytest.mark.parametrize("kernel", [pgss, twin_pgss], ids=["compiled", "twin"])

keys = st.one_of(st.sampled_from(["", "a", "b", "a/1", "a/2", "é", "a\U0010ffff"]), st.text(max_size=12))
tokens = st.binary(max_size=10).map(VersionToken)
updates = st.builds(
    lambda op, key, value, version: KvUpdate(op, key, value if op is Op.PUT else b"", version),
    st.sampled_from([Op.PUT, Op.PUT, Op.DELETE, Op.PURGE]), keys, st.binary(max_size=40), tokens,
)  # fmt: skip
histories = st.lists(st.tuples(st.lists(updates, max_size=12), st.binary(max_size=10)), max_size=6)


def encode(kernel: ModuleType, batch: UpdateBatch) -> bytes:
    spans = [part for span in (batch.keys, batch.values, batch.versions) for part in (span.offsets, span.lengths)]
    return bytes(kernel.encode(memoryview(batch.buffer), batch.ops, *spans))


def log_of(history: list[tuple[list[KvUpdate], bytes]]) -> bytes:
    parts = [HEADER]
    for batch, cursor in history:
        parts += [encode(pgss, UpdateBatch.of(batch)), cursor_record(cursor)]
    return b"".join(parts)


def facts(fold: Any) -> dict[str, Any]:
    offsets = fold.select(b"")
    return {
        "offsets": offsets.tolist(),
        "entries": [fold.read(at) for at in offsets.tolist()],
        "state": (fold.count, fold.live_bytes, fold.cursors, bool(fold.redundant), fold.cursor, fold.digest, fold.size),
        "ranges": [fold.select(prefix).tolist() for prefix in (b"a", b"a/", b"\xff", b"\xc3", b"b")],
        "found": [fold.find(key) for key in (b"", b"a", b"a/1", b"zz")],
    }


@given(st.lists(updates, max_size=20))
def test_both_encode_the_same_bytes(batch: list[KvUpdate]) -> None:
    columns = UpdateBatch.of(batch)
    expected = encode(pgss, columns)
    assert expected == encode(twin_pgss, columns)
    assert expected == pgss.encode_list(batch) == twin_pgss.encode_list(batch)


@given(histories, st.data())
@settings(max_examples=60)
def test_both_replay_any_damaged_log_alike(history: list[tuple[list[KvUpdate], bytes]], data: st.DataObject) -> None:
    log = bytearray(log_of(history))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(6, max(6, len(log) - 1)))
        if at < len(log):
            log[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(6, len(log)))
    raw = bytes(log[:cut]) + data.draw(st.one_of(st.just(b""), st.binary(max_size=30), st.just(bytes(20))))
    results = []
    for module, kernel in ((foldindex, pgss), (twin_foldindex, twin_pgss)):
        fold = module.Fold()
        fold.attach(raw, len(raw))
        end, status, detail = fold.index(6, True)
        results.append(
            [end, status, detail, facts(fold), kernel.find_record(raw, min(end + 1, len(raw)), len(raw)),
             kernel.last_cursor(raw, 6)]
        )  # fmt: skip
    assert results[0] == results[1]


@given(histories, histories, st.integers(1, 5))
@settings(max_examples=60)
def test_both_rewrite_a_log_alike_however_it_is_taken_in_parts(
    history: list[tuple[list[KvUpdate], bytes]], later: list[tuple[list[KvUpdate], bytes]], step: int
) -> None:
    log, tail = log_of(history), log_of(later)[6:]
    results = []
    for module, kernel in ((foldindex, pgss), (twin_foldindex, twin_pgss)):
        fold = module.Fold()
        fold.attach(log, len(log))
        fold.index(6, True)
        slots, offsets, ordered = fold.live()
        kernel.sort_records(log, slots, offsets, ordered)
        fold.adopt(slots)
        generation, parts = fold.generation, []
        lists = [(True, fold.sorted), (False, max(1, fold.unsorted))]
        for in_order, count in lists:
            for start in range(0, count, step):
                parts.append(fold.live_part(in_order, start, start + step, len(log)))
                if len(parts) == 2:  # what comes while the rewrite runs
                    fold.attach(log + tail, len(log) + len(tail))
                    fold.index(len(log), True)
        fold.attach(log + tail, len(log) + len(tail))
        if len(parts) < 2:
            fold.index(len(log), True)
        assert fold.generation == generation
        old = np.concatenate(parts)
        kernel.sort_records(log, np.arange(len(old), dtype=np.uint32), old, 0)
        out, lengths = np.empty(len(log) + 1, np.uint8), np.zeros(len(old), np.int64)
        number, used = kernel.copy_records(log, old, 0, out, lengths)
        assert number == len(old)
        whole = HEADER + bytes(out[:used]) + tail
        again = module.Fold()
        again.attach(whole, len(whole))
        again.index(6, True)
        found = [again.read(at) for at in again.select(b"").tolist()]
        assert found == [fold.read(at) for at in fold.select(b"").tolist()]
        assert (again.count, again.digest) == (fold.count, fold.digest)
        results.append(found)
    assert results[0] == results[1]


@BOTH
def test_a_part_that_cannot_be_is_refused(kernel: ModuleType) -> None:
    fold = (foldindex if kernel is pgss else twin_foldindex).Fold()
    with pytest.raises(ValueError, match="no part from 3 to 2"):
        fold.live_part(False, 3, 2, 0)


@given(st.lists(st.tuples(st.binary(max_size=20), st.one_of(st.none(), st.tuples(tokens, st.binary(max_size=50))))))
def test_both_digest_and_pack_alike(rows: list[tuple[bytes, tuple[VersionToken, bytes] | None]]) -> None:
    names = [key for key, _ in rows]
    records = [None if row is None else bytes((len(row[0].raw),)) + row[0].raw + row[1] for _, row in rows]
    assert pgss.digest_values(names, list(records)) == twin_pgss.digest_values(names, list(records))
    batch = UpdateBatch.of([KvUpdate(Op.PUT, "k", row[1], row[0]) for _, row in rows if row is not None])
    spans = (batch.values.offsets, batch.values.lengths, batch.versions.offsets, batch.versions.lengths)
    packed = pgss.pack_values(memoryview(batch.buffer), *spans)
    assert packed == twin_pgss.pack_values(memoryview(batch.buffer), *spans) == [r for r in records if r is not None]


@given(st.binary(max_size=300), st.lists(st.integers(-5, 310), max_size=5))
def test_both_refuse_the_same_offsets(data: bytes, places: list[int]) -> None:
    offsets = np.array(places, np.int64)
    answers = []
    for kernel in (pgss, twin_pgss):
        try:
            answers.append(kernel.columns(data, offsets).tolist())
        except ValueError as exc:
            answers.append(str(exc))
    assert answers[0] == answers[1]


@BOTH
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ops": 3}, "update 1 has an unknown op"),
        ({"keys": (0, 9)}, "update 1 lies outside its buffer"),
        ({"keys": (-1, 1)}, "update 1 lies outside its buffer"),
        ({"versions": (0, 6)}, "update 1 lies outside its buffer"),
        ({"keys": (4, 1)}, "update 1 has a key that is not UTF-8"),
    ],
)
def test_what_no_reader_would_take_is_refused_by_number(kernel: ModuleType, change: dict[str, Any], why: str) -> None:
    def span(name: str) -> Spans:
        offset, length = change.get(name, (0, 1))
        return Spans(np.array([0, offset]), np.array([1, length]))

    ops = np.array([0, change.get("ops", 0)], np.uint8)
    batch = UpdateBatch(b"abcd\xff", ops, span("keys"), span("values"), span("versions"))
    with pytest.raises(ValueError, match=why):
        encode(kernel, batch)


def test_the_hash_is_murmur3() -> None:
    # as published for MurmurHash3_x64_128 with seed 0
    assert twin_pgss.murmur(b"") == 0
    high, low = divmod(twin_pgss.murmur(b"The quick brown fox jumps over the lazy dog"), 1 << 64)
    assert (f"{low:016x}", f"{high:016x}") == ("e34bbc7bbc071b6c", "7a433ca9c49a9347")


@BOTH
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (KvUpdate.put("k" * 65536, b""), "update 1 has a key of more than 65535 bytes"),
        (KvUpdate.put("k", bytes((1 << 24) + 1)), "update 1 has a value of more than 16 MiB"),
        (KvUpdate.put("\ud800", b""), "update 1 has a key that is not UTF-8"),
    ],
)
def test_a_list_is_refused_in_the_same_words(kernel: ModuleType, bad: KvUpdate, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        kernel.encode_list([KvUpdate.put("a", b"1"), bad])
