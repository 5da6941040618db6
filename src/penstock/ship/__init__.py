"""Floor 6: sealed segments of logs on an object store, as they are, under a manifest; and those logs read from there.

>>> from penstock.ship import ShipOptions
>>> ShipOptions().delete_local
False
"""

from penstock.ship.compact import compact_fleet, forget_compacted, read_compacted
from penstock.ship.manifest import Entry, Head
from penstock.ship.part import ShipPart
from penstock.ship.prune import empty_trash, forget_before, remove_orphans
from penstock.ship.remote import ShippedLog, find_shipped, is_shipped, open_shipped
from penstock.ship.restore import restore_span
from penstock.ship.roll import roll_by_age, roll_quiet
from penstock.ship.shipper import ShipOptions, Shipper, ShipStatus
from penstock.ship.tiered import TieredLog

__all__ = [
    "Shipper",
    "ShipOptions",
    "ShipStatus",
    "ShipPart",
    "roll_by_age",
    "roll_quiet",
    "Head",
    "Entry",
    "open_shipped",
    "is_shipped",
    "find_shipped",
    "ShippedLog",
    "TieredLog",
    "restore_span",
    "forget_before",
    "empty_trash",
    "remove_orphans",
    "compact_fleet",
    "forget_compacted",
    "read_compacted",
]
