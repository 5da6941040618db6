"""What was erased here after it was shipped: a segment then has other bytes than its object, and is no other one.

Erasing (node/erase.py) puts a purge without a payload in the place of a record.  Who finds other bytes than were
shipped compares record by record before he takes the log for another one.
"""

from __future__ import annotations

from penstock.batch import Batch
from penstock.disk import ObjectStore
from penstock.log.envelope import CONTENT, is_erased
from penstock.log.face import LogReader
from penstock.ship.manifest import Entry, Head
from penstock.ship.remote import ShippedLog

__all__ = ["differs_by_erasure"]


def differs_by_erasure(log: LogReader, store: ObjectStore, head: Head, entry: Entry) -> bool:
    """Whether the log here has the records of an entry, but for some that were erased."""
    if log.content != CONTENT:
        return False
    with ShippedLog(f"{store.url}/{head.channel}", store, head=head) as shipped:
        at = entry.first
        while at < entry.next:
            here, there = _before(log.read(at), entry.next), _before(shipped.read(at), entry.next)
            count = min(len(here), len(there))
            if not count:
                return len(here) == len(there)
            here, there = here[:count], there[:count]
            if here.positions.tolist() != there.positions.tolist():
                return False
            pairs = zip(here.to_payloads(), there.to_payloads(), strict=True)
            if any(mine != theirs and not is_erased(bytes(mine)) for mine, theirs in pairs):
                return False
            at = int(here.positions[-1]) + 1
    return True


def _before(batch: Batch, end: int) -> Batch:
    return batch[: int(batch.positions.searchsorted(end))]
