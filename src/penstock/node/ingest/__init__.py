"""Several producers on one channel: they hand batches to the node, which is the one writer.

producer ── IngestWriter ──┐                      ┌─ store: who has written how much (memory.py)
producer ── IngestWriter ──┼─ socket ── channel ──┤
producer ── penstock write ┘   (wire.py)          └─ log: the records, in the order they came
"""

from penstock.node.ingest.client import IngestWriter
from penstock.node.ingest.server import IngestPart

__all__ = ["IngestWriter", "IngestPart"]
