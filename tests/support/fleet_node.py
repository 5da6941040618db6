"""One node of a fleet: it begins as bootstrap says, follows a bucket, and exports once; then it says what it did.

fleet_node.py NAME FOLDER NATS_URL BUCKET OBJECTS_URL [--only-follow]
"""

from __future__ import annotations

import asyncio
import json
import sys

from penstock.artifact import ExportLease, bootstrap, bucket_window, exporter_of, run_export_round, transport_for
from penstock.batch import UpdateBatch
from penstock.fold import AppliedWatch, WatchScope
from penstock.kv import NatsConnection, NatsOptions
from penstock.store import AppendLogStore


async def main() -> None:
    name, folder, nats, bucket, url = sys.argv[1:6]
    delivered = 0

    def count(batch: UpdateBatch) -> None:
        nonlocal delivered
        delivered += len(batch)

    async with NatsConnection(NatsOptions(url=nats)) as connection:
        store = await connection.store(bucket)
        leases = await connection.store("leases")
        transport = transport_for(url)
        path = f"{folder}/{name}.snap"
        report = await bootstrap(path, bucket_window(store.watcher), transport, "fold")
        stop = asyncio.Event()
        with AppendLogStore.open(path) as fold:
            watch = AppliedWatch(
                store.watcher, WatchScope.all(), apply=count, store=fold, reader=store.reader, stop=stop, name=name
            )
            running = asyncio.create_task(watch.run())
            async with asyncio.timeout(120):
                while not watch.hydrated:
                    await asyncio.sleep(0.01)
            outcome = ""
            if "--only-follow" not in sys.argv:
                lease = ExportLease(leases, "export", name)
                done = await run_export_round(lease, 1, exporter_of(watch), transport, "fold", folder)
                outcome = "lost" if done.outcome is None else done.outcome.result
            stop.set()
            await running
            entries = {entry.key: entry.value.decode() for entry in fold.range()}
            cursor = fold.cursor().token.as_int()
    about = {"way": report.way, "reason": report.reason, "from": report.cursor.token.as_int(), "delivered": delivered}
    print(json.dumps({**about, "outcome": outcome, "entries": entries, "cursor": cursor}))


if __name__ == "__main__":
    asyncio.run(main())
