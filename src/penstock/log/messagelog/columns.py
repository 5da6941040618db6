"""Whatever a caller has many of, as columns of entries: payloads, senders, milliseconds."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.batch import Batch, Spans
from penstock.errors import OptionsError
from penstock.log.columns import columns_of
from penstock.log.messagelog.format import MAX_SENDER_BYTES

__all__ = ["EntryColumns", "entry_columns", "sender_bytes"]


class EntryColumns(msgspec.Struct, frozen=True):
    """Payload spans over one buffer and sender spans over another; senders and times are one for all or one each."""

    data: Any
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sender_data: Any
    sender_offsets: NDArray[np.int64]
    sender_lengths: NDArray[np.int64]
    times: NDArray[np.uint64]


def sender_bytes(sender: str | bytes) -> bytes:
    r"""Return the bytes of a sender.

    >>> sender_bytes("zoë@localhost")[:4]
    b'zo\xc3\xab'
    """
    return sender.encode() if isinstance(sender, str) else bytes(memoryview(sender))


def entry_columns(payloads: Any, sender: Any = None, timestamp_ns: Any = None) -> EntryColumns:
    """Return the columns of a Batch, an Arrow array or an iterable of bytes; a Batch brings its senders and times.

    >>> columns = entry_columns([b"one", b"three"], ["ann", "bob"], 5_000_000)
    >>> columns.lengths.tolist(), columns.sender_lengths.tolist(), columns.times.tolist()
    ([3, 5], [3, 3], [5])
    """
    columns = columns_of(payloads, 0, timestamp_ns)
    count = len(columns.offsets)
    spans = payloads.extra.get("from") if sender is None and isinstance(payloads, Batch) else None
    if isinstance(spans, Spans):
        who: Any = columns.data
        offsets, lengths = spans.offsets, spans.lengths
    else:
        single = sender is None or isinstance(sender, str | bytes)
        texts = [sender_bytes(sender or b"")] if single else sender
        if not single and not hasattr(texts, "buffers"):
            texts = [sender_bytes(text) for text in texts]
        found = columns_of(texts, 0, 0)
        who, offsets, lengths = found.data, found.offsets, found.lengths
        if not single and len(offsets) != count:
            raise OptionsError(f"sender has {len(offsets)} values for {count} records")
    if len(lengths) and int(lengths.max()) > MAX_SENDER_BYTES:
        raise OptionsError(f"a sender of {int(lengths.max())} bytes is longer than {MAX_SENDER_BYTES}")
    return EntryColumns(
        columns.data, columns.offsets, columns.lengths, who, offsets, lengths,
        columns.timestamps // np.uint64(1_000_000),
    )  # fmt: skip
