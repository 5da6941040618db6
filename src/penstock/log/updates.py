"""Envelopes as key-value updates: what buckets and folds make of a log whose records have keys."""

from __future__ import annotations

import numpy as np

from penstock.batch import Batch, Spans, UpdateBatch
from penstock.log.envelope import open_envelopes
from penstock.types import Op

__all__ = ["envelope_updates"]

TOKEN_BYTES = 8


def envelope_updates(batch: Batch, log: str = "log") -> UpdateBatch:
    """Return the updates of a batch of envelopes, opened already or not; the version is the position.

    No Python runs per record.  An update batch has one buffer, so the bytes of the batch are copied once, in one
    piece, in front of the versions.

    >>> from penstock.log.envelope import Envelope, encode_envelope
    >>> records = [encode_envelope(Envelope(b"a", b"1")), encode_envelope(Envelope(b"a", op=Op.DELETE))]
    >>> envelope_updates(Batch.of(records, positions=[7, 8])).to_pylist()[0]["version"].hex()
    '0000000000000007'
    """
    if not ("op" in batch.extra and "key" in batch.extra):
        batch = open_envelopes(batch, log)
    keys, values = batch.extra["key"], batch.payloads
    ops = np.asarray(batch.extra["op"])
    assert isinstance(keys, Spans)
    if not len(ops):
        return UpdateBatch(b"", ops, keys, values, Spans(keys.offsets, keys.lengths))
    low = int(min(keys.offsets.min(), values.offsets.min()))
    high = int(max((keys.offsets + keys.lengths).max(), (values.offsets + values.lengths).max()))
    versions = batch.positions.astype(">u8").tobytes()
    starts = high - low + TOKEN_BYTES * np.arange(len(ops), dtype=np.int64)
    return UpdateBatch(
        b"".join((batch.view[low:high], versions)),
        ops,
        Spans(keys.offsets - low, keys.lengths),
        Spans(values.offsets - low, np.where(ops == Op.PUT, values.lengths, 0)),
        Spans(starts, np.full(len(ops), TOKEN_BYTES, np.int64)),
    )
