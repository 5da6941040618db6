"""What a fold on Spark does to a store, without Spark: parts, the cursor last, and a death in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import OptionsError
from penstock.fold import follow
from penstock.fold.source import source_of
from penstock.log.detect import open_log
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.xchannel import Writer
from penstock.spark.pipelines.fold import _apply, _bounds
from penstock.store import AppendLogStore, LmdbStore, RocksStore


class Killed(BaseException):
    """Stands for kill -9."""


def part(**positions: int) -> pa.RecordBatch:
    """Return puts as Spark hands them over."""
    count = len(positions)
    columns: dict[str, list[Any]] = {"op": [0] * count, "value": [b"v"] * count, "changes": [1] * count}
    columns |= {"key": [key.encode() for key in positions], "version": list(positions.values())}
    return pa.RecordBatch.from_pydict(columns)


@pytest.mark.parametrize("backend", [AppendLogStore, RocksStore, LmdbStore])
def test_a_store_that_was_left_half_filled_is_begun_again_and_never_gone_on_with(tmp_path: Path, backend: Any) -> None:
    path, store = str(tmp_path / "log"), str(tmp_path / "store")
    with Writer.open(path, content=CONTENT) as writer:
        first = writer.append(encode_envelope(Envelope(b"a", b"v")))
        last = writer.append(encode_envelope(Envelope(b"b", b"v")))
    with open_log(path) as log:
        source, end = source_of(log), log.next_position

        def dies() -> Iterator[pa.RecordBatch]:
            yield part(a=first, gone=first)  # a record deletes it that retention will have taken
            raise Killed

        with backend.open(store) as held, pytest.raises(Killed):
            _apply(path, source, held, dies())
        with backend.open(store) as held:
            assert held.count() == 2
            with pytest.raises(OptionsError, match="no position of a log"):
                asyncio.run(follow(log, held, once=True))
            assert _bounds(path, held)[:2] == (first, end)
            _apply(path, source, held, iter([part(a=first), part(b=last)]))
            assert [entry.key for entry in held.range()] == ["a", "b"]
            assert held.cursor().token.as_int() == end
