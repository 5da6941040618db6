"""A process that ships one log until nothing is left to ship: tests kill it at its fail points."""

from __future__ import annotations

import sys

from penstock.disk import object_store_for
from penstock.ship import ShipOptions, Shipper


def main() -> None:
    path, url = sys.argv[1:3]
    options = ShipOptions(page_entries=3, delete_local=True, batch_bytes=1)
    with Shipper(path, object_store_for(url), node="edge", options=options) as shipper:
        while shipper.step():
            pass


if __name__ == "__main__":
    main()
