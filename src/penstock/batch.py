"""Many records, or many key-value updates, at once: arrays over one buffer.

A batch is what travels between the floors.  It owns what it points into: the mapped file or the
buffer stays alive as long as the batch, a slice of it, a payload view or an Arrow array made from it.
Nothing here makes Python objects one by one unless the caller asks for objects.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from penstock import kernel
from penstock.errors import OptionsError
from penstock.types import KvUpdate, Op, Record, VersionToken

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Spans", "Batch", "UpdateBatch"]

Int64 = NDArray[np.int64]

MAX_SPAN = (1 << 31) - 1  # Arrow's views and plain binary columns count in 32 bits


class Spans:
    """A column of byte strings: offsets and lengths over a batch's buffer.

    >>> import numpy as np
    >>> column = Spans(np.array([0, 3]), np.array([3, 2]))
    >>> column.of(memoryview(b"onetw"), 1).tobytes()
    b'tw'
    """

    __slots__ = ("lengths", "offsets")

    def __init__(self, offsets: Int64, lengths: Int64) -> None:
        if len(offsets) != len(lengths):
            raise OptionsError("offsets and lengths differ in length")
        self.offsets: Int64 = np.ascontiguousarray(offsets, np.int64)
        self.lengths: Int64 = np.ascontiguousarray(lengths, np.int64)

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, part: slice | NDArray[Any]) -> Spans:
        return Spans(self.offsets[part], self.lengths[part])

    def of(self, view: memoryview, index: int) -> memoryview:
        """Return string ``index`` of the buffer ``view``."""
        start = int(self.offsets[index])
        return view[start : start + int(self.lengths[index])]

    def to_list(self, buffer: Any) -> list[bytes]:
        """Return all strings as bytes objects."""
        return kernel.to_bytes_list(_bytes(buffer), self.offsets, self.lengths)

    def to_arrow(self, buffer: Any, *, view: bool) -> pa.Array:
        """Return the strings as an Arrow array: without a copy, or gathered into one run."""
        return _views(buffer, self) if view else _gathered(buffer, self)


class Batch(Sequence[Record]):
    """Many records of one log: arrays of positions, times, kinds and spans over one buffer.

    ``timestamps`` and ``kinds`` are None in formats that have none.  ``extra`` holds what only some
    formats have (sender, key, …): an array, or Spans over the same buffer.  ``next_position`` is
    where reading goes on after the batch: positions are sparse, so it is not the last one plus one.

    >>> batch = Batch.of([b"one", b"two"], kinds=[1, 2], timestamps=[10, 20])
    >>> len(batch), bytes(batch.payload(1)), batch[-1].kind
    (2, b'two', 2)
    >>> [record.position for record in batch[::-1]]
    [1, 0]
    """

    __slots__ = ("_view", "buffer", "extra", "kinds", "next_position", "payloads", "positions",
                 "timestamps")  # fmt: skip

    def __init__(
        self,
        buffer: Any,
        positions: Int64,
        payloads: Spans,
        *,
        timestamps: NDArray[np.uint64] | None = None,
        kinds: NDArray[np.uint16] | None = None,
        extra: Mapping[str, NDArray[Any] | Spans] | None = None,
        next_position: int | None = None,
    ) -> None:
        self.buffer = buffer
        self.positions = positions
        self.payloads = payloads
        self.timestamps = timestamps
        self.kinds = kinds
        self.extra = dict(extra) if extra else {}
        if next_position is None:
            next_position = int(positions[-1]) + 1 if len(positions) else 0
        self.next_position = next_position
        self._view: memoryview | None = None
        count = len(positions)
        for column in (payloads, timestamps, kinds, *self.extra.values()):
            if column is not None and len(column) != count:
                raise OptionsError("the columns of a batch differ in length")

    @classmethod
    def of(
        cls,
        payloads: Iterable[bytes],
        *,
        positions: Sequence[int] | None = None,
        timestamps: Sequence[int] | None = None,
        kinds: Sequence[int] | None = None,
        next_position: int | None = None,
    ) -> Batch:
        """Return a batch made of bytes objects, for tests and for callers that have only those."""
        chunks = list(payloads)
        lengths = np.fromiter(map(len, chunks), np.int64, len(chunks))
        offsets = np.cumsum(lengths) - lengths
        return cls(
            b"".join(chunks),
            np.arange(len(chunks), dtype=np.int64) if positions is None else np.asarray(positions, np.int64),
            Spans(offsets, lengths),
            timestamps=None if timestamps is None else np.asarray(timestamps, np.uint64),
            kinds=None if kinds is None else np.asarray(kinds, np.uint16),
            next_position=next_position,
        )

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def view(self) -> memoryview:
        """The buffer as bytes."""
        if self._view is None:
            self._view = _bytes(self.buffer)
        return self._view

    def payload(self, index: int) -> memoryview:
        """Return the bytes of one record, without copying them."""
        return self.payloads.of(self.view, index)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Batch: ...
    def __getitem__(self, index: int | slice) -> Record | Batch:
        if isinstance(index, slice):
            return self._part(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} of a batch of {len(self)}")
        return Record(
            int(self.positions[index]),
            None if self.timestamps is None else int(self.timestamps[index]),
            None if self.kinds is None else int(self.kinds[index]),
            self.payload(index),
            self._extra(index) if self.extra else None,
        )

    def __iter__(self) -> Iterator[Record]:
        view, starts, lengths = self.view, self.payloads.offsets, self.payloads.lengths
        nothing = [None] * len(self)
        times = nothing if self.timestamps is None else self.timestamps.tolist()
        kinds = nothing if self.kinds is None else self.kinds.tolist()
        rows = zip(self.positions.tolist(), times, kinds, starts.tolist(), lengths.tolist(), strict=True)
        for index, (position, time, kind, start, length) in enumerate(rows):
            extra = self._extra(index) if self.extra else None
            yield Record(position, time, kind, view[start : start + length], extra)

    def __repr__(self) -> str:
        where = f" from {self.positions[0]} to {self.positions[-1]}" if len(self) else ""
        return f"<Batch of {len(self)} records{where}>"

    def filter(self, keep: NDArray[np.bool_]) -> Batch:
        """Return the records for which ``keep`` is true; reading still goes on after all of them."""
        return self._part(keep)

    def to_payloads(self) -> list[bytes]:
        """Return copies of all payloads."""
        return self.payloads.to_list(self.buffer)

    def to_pylist(self) -> list[dict[str, Any]]:
        """Return one dict a record, payloads as bytes: what ``to_arrow().to_pylist()`` gives, sooner.

        >>> Batch.of([b"one"], kinds=[7]).to_pylist()
        [{'position': 0, 'timestamp_ns': None, 'kind': 7, 'payload': b'one'}]
        """
        nothing = [None] * len(self)
        columns: dict[str, list[Any]] = {
            "position": self.positions.tolist(),
            "timestamp_ns": nothing if self.timestamps is None else self.timestamps.tolist(),
            "kind": nothing if self.kinds is None else self.kinds.tolist(),
        }
        for name, column in self.extra.items():
            columns[name] = column.to_list(self.buffer) if isinstance(column, Spans) else column.tolist()
        columns["payload"] = self.to_payloads()
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def to_arrow(self, *, view: bool = True) -> pa.RecordBatch:
        """Return an Arrow record batch (needs the ``arrow`` extra).

        With ``view`` the byte columns are ``binary_view`` over the mapped file: nothing is copied.
        Without it they are ``binary``, gathered into one run: that is what Spark takes.
        ``timestamp_ns`` is int64 with the bits as stored; ``timestamp`` (µs, UTC) is null where
        they mean a time past 2262.

        >>> Batch.of([b"one", b"two"]).to_arrow().column("payload").to_pylist()
        [b'one', b'two']
        """
        import pyarrow as pa

        columns: dict[str, pa.Array] = {"position": pa.array(self.positions)}
        if self.timestamps is None:
            columns["timestamp"] = pa.nulls(len(self), pa.timestamp("us", "UTC"))
            columns["timestamp_ns"] = pa.nulls(len(self), pa.int64())
        else:
            signed = self.timestamps.view(np.int64)
            micros = pa.array(signed // 1000, mask=signed < 0)
            columns["timestamp"] = micros.cast(pa.timestamp("us", "UTC"))
            columns["timestamp_ns"] = pa.array(signed)
        columns["kind"] = (
            pa.nulls(len(self), pa.int32()) if self.kinds is None else pa.array(self.kinds.astype(np.int32))
        )
        for name, column in self.extra.items():
            columns[name] = column.to_arrow(self.buffer, view=view) if isinstance(column, Spans) else pa.array(column)
        columns["payload"] = self.payloads.to_arrow(self.buffer, view=view)
        return pa.RecordBatch.from_pydict(columns)

    def _part(self, part: slice | NDArray[np.bool_]) -> Batch:
        positions = np.ascontiguousarray(self.positions[part])
        whole = isinstance(part, slice) and part.indices(len(self))[1:] == (len(self), 1)
        cut = not isinstance(part, slice) or whole or not len(positions)
        return Batch(
            self.buffer,
            positions,
            self.payloads[part],
            timestamps=None if self.timestamps is None else np.ascontiguousarray(self.timestamps[part]),
            kinds=None if self.kinds is None else np.ascontiguousarray(self.kinds[part]),
            extra={name: column[part] for name, column in self.extra.items()},
            next_position=self.next_position if cut else self._after(positions),
        )

    def _after(self, positions: Int64) -> int:
        """Return where reading goes on behind the furthest of these positions."""
        index = int(np.searchsorted(self.positions, positions.max())) + 1
        return int(self.positions[index]) if index < len(self) else self.next_position

    def _extra(self, index: int) -> dict[str, object]:
        return {
            name: column.of(self.view, index) if isinstance(column, Spans) else column[index].item()
            for name, column in self.extra.items()
        }


class UpdateBatch(Sequence[KvUpdate]):
    """Many changes of a key-value state: op, key, value and version columns over one buffer.

    A version of no bytes is unknown.  Values of deletes and purges are empty.

    >>> batch = UpdateBatch.of([KvUpdate.put("a", b"1", 1), KvUpdate.delete("b", 2)])
    >>> len(batch), batch[1].op.name, batch[0].value
    (2, 'DELETE', b'1')
    """

    __slots__ = ("buffer", "keys", "ops", "values", "versions")

    def __init__(self, buffer: Any, ops: NDArray[np.uint8], keys: Spans, values: Spans, versions: Spans) -> None:
        if not len(ops) == len(keys) == len(values) == len(versions):
            raise OptionsError("the columns of an update batch differ in length")
        self.buffer, self.ops, self.keys, self.values, self.versions = (
            buffer, ops, keys, values, versions,
        )  # fmt: skip

    @classmethod
    def of(cls, updates: Iterable[KvUpdate]) -> UpdateBatch:
        """Return the batch of these updates."""
        items = list(updates)
        chunks = [chunk for item in items for chunk in (item.key.encode(), item.value, item.version.raw)]
        lengths = np.fromiter(map(len, chunks), np.int64, len(chunks))
        offsets = np.cumsum(lengths) - lengths
        return cls(
            b"".join(chunks),
            np.fromiter((item.op for item in items), np.uint8, len(items)),
            *(Spans(offsets[column::3], lengths[column::3]) for column in range(3)),
        )

    @classmethod
    def concat(cls, batches: Sequence[UpdateBatch]) -> UpdateBatch:
        """Return one batch with the updates of all of these, in order.

        >>> one, two = UpdateBatch.of([KvUpdate.put("a", b"1")]), UpdateBatch.of([KvUpdate.delete("a")])
        >>> [update.op.name for update in UpdateBatch.concat([one, two])]
        ['PUT', 'DELETE']
        """
        if len(batches) == 1:
            return batches[0]
        buffers = [_bytes(batch.buffer) for batch in batches]
        sizes = np.fromiter(map(len, buffers), np.int64, len(buffers))
        starts = (np.cumsum(sizes) - sizes).tolist()

        def column(name: str) -> Spans:
            parts: list[Spans] = [getattr(batch, name) for batch in batches]
            moved = [part.offsets + start for part, start in zip(parts, starts, strict=True)]
            return Spans(_joined(moved, np.int64), _joined([part.lengths for part in parts], np.int64))

        ops = _joined([batch.ops for batch in batches], np.uint8)
        return cls(b"".join(buffers), ops, column("keys"), column("values"), column("versions"))

    def revisions(self) -> NDArray[np.uint64]:
        """Return the versions that are 64-bit revisions, in order; unknown and foreign ones are left out.

        >>> UpdateBatch.of([KvUpdate.put("a", b"1", 7), KvUpdate.delete("b")]).revisions().tolist()
        [7]
        """
        starts = self.versions.offsets[self.versions.lengths == 8]
        raw = np.frombuffer(_bytes(self.buffer), np.uint8)
        found: NDArray[np.uint64] = raw[starts[:, None] + np.arange(8)].view(">u8").ravel().astype(np.uint64)
        return found

    def __len__(self) -> int:
        return len(self.ops)

    @overload
    def __getitem__(self, index: int) -> KvUpdate: ...
    @overload
    def __getitem__(self, index: slice) -> UpdateBatch: ...
    def __getitem__(self, index: int | slice) -> KvUpdate | UpdateBatch:
        if isinstance(index, slice):
            return UpdateBatch(
                self.buffer,
                np.ascontiguousarray(self.ops[index]),
                self.keys[index],
                self.values[index],
                self.versions[index],
            )
        if not -len(self) <= index < len(self):
            raise IndexError(f"update {index} of a batch of {len(self)}")
        view = _bytes(self.buffer)
        return KvUpdate(
            Op(int(self.ops[index])),
            str(self.keys.of(view, index), "utf-8"),
            bytes(self.values.of(view, index)),
            VersionToken(bytes(self.versions.of(view, index))),
        )

    def __repr__(self) -> str:
        return f"<UpdateBatch of {len(self)} updates>"

    def to_pylist(self) -> list[dict[str, Any]]:
        """Return one dict an update: op by name, key as text, value and version as bytes.

        >>> UpdateBatch.of([KvUpdate.put("a", b"1")]).to_pylist()
        [{'op': 'put', 'key': 'a', 'value': b'1', 'version': b''}]
        """
        names = [op.name.lower() for op in Op]
        rows = zip(
            self.ops.tolist(),
            self.keys.to_list(self.buffer),
            self.values.to_list(self.buffer),
            self.versions.to_list(self.buffer),
            strict=True,
        )
        return [
            {"op": names[op], "key": key.decode(), "value": value, "version": version}
            for op, key, value, version in rows
        ]

    def to_arrow(self, *, view: bool = True) -> pa.RecordBatch:
        """Return an Arrow record batch with op (uint8), key, value and version as byte columns.

        >>> UpdateBatch.of([KvUpdate.put("a", b"1")]).to_arrow().column("key").to_pylist()
        [b'a']
        """
        import pyarrow as pa

        return pa.RecordBatch.from_pydict(
            {
                "op": pa.array(self.ops),
                "key": self.keys.to_arrow(self.buffer, view=view),
                "value": self.values.to_arrow(self.buffer, view=view),
                "version": self.versions.to_arrow(self.buffer, view=view),
            }
        )


def payload_text(payload: bytes | memoryview) -> tuple[str, str]:
    r"""Return (``payload``, text) for valid UTF-8, else (``payload_base64``, its base 64).

    >>> payload_text(b"caf\xc3\xa9"), payload_text(b"\xff")
    (('payload', 'café'), ('payload_base64', '/w=='))
    """
    try:
        return "payload", str(payload, "utf-8")
    except UnicodeDecodeError:
        return "payload_base64", base64.b64encode(payload).decode()


def _joined(parts: Sequence[NDArray[Any]], kind: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, kind)


def _bytes(buffer: Any) -> memoryview:
    return memoryview(buffer).cast("B")


def _views(buffer: Any, spans: Spans) -> pa.Array:
    import pyarrow as pa

    if not len(spans):
        return pa.array([], pa.binary_view())
    low = int(spans.offsets.min())
    high = int((spans.offsets + spans.lengths).max())
    if high - low > MAX_SPAN:
        raise OptionsError(f"a batch over {high - low} bytes is too wide for an Arrow view: slice it")
    views = np.empty(16 * len(spans), np.uint8)
    kernel.binary_views(_bytes(buffer), spans.offsets, spans.lengths, low, views)
    # Only the bytes of the records are handed out: a mapping may reach past the end of its file.
    data = pa.py_buffer(_bytes(buffer)[low:high])
    return pa.Array.from_buffers(pa.binary_view(), len(spans), [None, pa.py_buffer(views), data], null_count=0)


def _gathered(buffer: Any, spans: Spans) -> pa.Array:
    import pyarrow as pa

    total = kernel.total_bytes(len(_bytes(buffer)), spans.offsets, spans.lengths)
    data = np.empty(total, np.uint8)
    starts = np.empty(len(spans) + 1, np.int64)
    kernel.gather_spans(_bytes(buffer), spans.offsets, spans.lengths, data, starts)
    wide = total > MAX_SPAN
    offsets = starts if wide else starts.astype(np.int32)
    kind = pa.large_binary() if wide else pa.binary()
    return pa.Array.from_buffers(kind, len(spans), [None, pa.py_buffer(offsets), pa.py_buffer(data)], null_count=0)
