"""What compacted files hold of one log, read as a log: for spans whose segments were forgotten since.

A file is fetched whole and its BLAKE3 compared before a record of it is seen.  That says that it is the one of the
manifest, and nothing of who wrote both: a few kilobytes can unpack to terabytes, so what they will take is looked at
before it is taken.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from penstock.batch import Batch, Spans
from penstock.disk import ClosingHandle, ObjectStore, object_store_for
from penstock.errors import CorruptionError, ExpiredError, UnsupportedError
from penstock.log.options import DEFAULT_LIMIT
from penstock.ship.compact import ROW_BYTES, UNPACKED_BYTES, Compacted
from penstock.ship.manifest import Head

__all__ = ["CompactedLog", "CompactedPart", "parts_of"]

UNPACKED_TIMES: Final = 64
"""A file unpacks to at most UNPACKED_BYTES, or so many times its own where that is more."""


class CompactedPart(msgspec.Struct, frozen=True):
    """A span of one log in one file, with everything that reading it takes.

    >>> CompactedPart("s3://b/fleet", "compacted/x", 9, "ab", 2, "edge-1/ticks", "edge-1", "ticks", "raw", 80, 96).first
    80
    """

    place: str
    key: str
    bytes: int
    blake3: str
    rows: int
    """Rows of the file, of all logs."""
    log: str
    node: str
    channel: str
    content: str
    first: int
    next: int
    min_time_ns: int | None = None
    max_time_ns: int | None = None


def parts_of(compacted: Compacted, place: str, log: str, head: Head) -> list[CompactedPart]:
    """Return what the files at a place hold of a log in front of its first segment, without a hole up to there."""
    found = [
        CompactedPart(
            place, file.key, file.bytes, file.blake3, file.rows, log, span.node, span.channel, head.content,
            span.first, span.next, file.min_time_ns, file.max_time_ns,
        )
        for file in compacted.files
        for span in file.spans
        if span.log == log and span.log_id == head.log_id and span.first < head.first
    ]  # fmt: skip
    whole: list[CompactedPart] = []
    reached = head.first
    for part in sorted(found, key=lambda part: part.first, reverse=True):
        if part.next < reached:
            break
        whole.insert(0, msgspec.structs.replace(part, next=min(part.next, reached)))
        reached = part.first
    return whole


class CompactedLog(ClosingHandle):
    """One part, with as much of the face of logs as reading takes."""

    def __init__(self, part: CompactedPart, store: ObjectStore | None = None) -> None:
        super().__init__()
        self.part, self.path, self.content = part, f"{part.place}/{part.log}", part.content
        self.first_position, self.next_position = part.first, part.next
        self._store = store or object_store_for(part.place)
        self._batch: Batch | None = None

    def read(self, position: int, limit: int = DEFAULT_LIMIT) -> Batch:
        """Return records from ``position`` on."""
        batch = self._load()
        at = int(batch.positions.searchsorted(position))
        found = batch[at : at + limit]
        if at + limit >= len(batch):
            found.next_position = self.part.next
        return found

    def _load(self) -> Batch:
        if self._batch is None:
            self._batch = _batch(self._fetch(), self.part)
        return self._batch

    def _fetch(self) -> bytes:
        from blake3 import blake3

        where = f"{self.part.place}/{self.part.key}"
        try:
            data, _ = self._store.get(self.part.key)
        except FileNotFoundError:
            raise ExpiredError(where, self.part.first, self.part.next) from None
        found = blake3(data).hexdigest()
        if found != self.part.blake3:
            raise CorruptionError(where, 0, f"its BLAKE3 is {found}, the manifest says {self.part.blake3}")
        return data

    def close(self) -> None:
        """Let go of the records."""
        self._batch = None


def _batch(data: bytes, part: CompactedPart) -> Batch:
    """Return the records of a part in the order of their positions."""
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        from pyarrow import parquet
    except ImportError:
        raise UnsupportedError("compacted files need pyarrow: pip install 'penstock[arrow]'") from None
    _check_size(pa, parquet, data, part)
    table = parquet.read_table(pa.BufferReader(data))
    if "log" in table.column_names:
        mine = pc.equal(table["log"], part.log)
    else:
        mine = pc.and_(pc.equal(table["node"], part.node), pc.equal(table["channel"], part.channel))
    inside = pc.and_(pc.greater_equal(table["position"], part.first), pc.less(table["position"], part.next))
    table = table.filter(pc.and_(mine, inside)).sort_by("position").combine_chunks()
    payloads, buffer = _spans(table["payload"])
    extra: dict[str, Any] = {}
    if "from" in table.column_names and table["from"].null_count < max(1, table.num_rows):
        senders, more = _spans(table["from"].fill_null(b""))
        extra = {"seq": _numbers(table["position"]), "from": Spans(senders.offsets + len(buffer), senders.lengths)}
        buffer += more
    times = None if table["timestamp_ns"].null_count else _numbers(table["timestamp_ns"]).view(np.uint64)
    kinds = None if table["kind"].null_count else _numbers(table["kind"]).astype(np.uint16)
    return Batch(
        buffer, _numbers(table["position"]), payloads, timestamps=times, kinds=kinds, extra=extra,
        next_position=part.next,
    )  # fmt: skip


def _check_size(pa: Any, parquet: Any, data: bytes, part: CompactedPart) -> None:
    """Raise CorruptionError for a file whose records would take far more memory than it has bytes."""
    most = max(UNPACKED_BYTES, UNPACKED_TIMES * len(data))
    where = f"{part.place}/{part.key}"
    packed = [name for name in ("payload", "from") if name in parquet.read_schema(pa.BufferReader(data)).names]
    with parquet.ParquetFile(pa.BufferReader(data), read_dictionary=packed) as file:
        about = file.metadata
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        needed = ROW_BYTES * sum(group.num_rows for group in groups)
        needed += sum(
            group.column(index).total_uncompressed_size for group in groups for index in range(group.num_columns)
        )
        for number in range(len(groups)):
            if needed > most:
                break
            for column in file.read_row_group(number, columns=packed).columns:
                needed += sum(_length(pa, chunk) for chunk in column.chunks)
    if needed > most:
        raise CorruptionError(where, 0, f"{len(data)} bytes that unpack to {needed} or more, where {most} are the most")


def _length(pa: Any, chunk: Any) -> int:
    """Return how many bytes the values of a dictionary array have, each as often as it is there."""
    import pyarrow.compute as pc

    lengths = pc.binary_length(chunk.dictionary).cast(pa.int64())
    return pc.sum(lengths.take(chunk.indices)).as_py() or 0


def _numbers(column: Any) -> Any:
    return column.to_numpy().copy()


def _spans(column: Any) -> tuple[Spans, bytes]:
    values = column.to_pylist()
    lengths = np.array([len(value) for value in values], np.int64)
    return Spans(np.cumsum(lengths) - lengths, lengths), b"".join(values)
