"""Small files of every format, as a release writes them: made once for each release, kept, and read by all later ones.

python tests/support/released.py 0.1.0

makes tests/vectors/released/0.1.0.tar.gz.  A release whose archive is there is not made again: what is in it is what
its users have on their disks.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import BinaryType, StructType

from penstock.artifact import export_store
from penstock.channels import ChannelManager
from penstock.disk import object_store_for
from penstock.fold import follow
from penstock.kv import EmbeddedConnection, StoreConfig
from penstock.log.detect import open_log
from penstock.log.envelope import Envelope, encode_envelope
from penstock.log.filechannel import FileChannel
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Reader, Writer
from penstock.ship import ShipOptions, Shipper
from penstock.spark.source.stream import LogStreamReader
from penstock.spark.source.table import PenstockSource
from penstock.store import AppendLogStore, LmdbStore, RocksStore
from penstock.types import KvUpdate, WatchCursor

ARCHIVES = Path(__file__).parents[1] / "vectors" / "released"
ANN = "ann@localhost"
YEARS = 86400.0 * 365 * 25


def payloads(count: int = 60) -> list[bytes]:
    """Return what the logs hold."""
    return [b"record %04d " % number + b"x" * (number % 50) for number in range(count)]


def changes(count: int = 60) -> list[bytes]:
    """Return records with keys: twenty of them, put three times, every seventh deleted at last."""
    made = [encode_envelope(Envelope(b"k%02d" % (number % 20), b"v%d" % number)) for number in range(count)]
    return made + [encode_envelope(Envelope(b"k%02d" % key, b"", op=1)) for key in range(0, 20, 7)]


def folded() -> dict[str, bytes]:
    """Return what a fold of ``changes`` holds."""
    return {f"k{key:02}": b"v%d" % (key + 40) for key in range(20) if key % 7}


def make(root: Path) -> None:
    """Write everything below a folder."""
    root.mkdir(parents=True, exist_ok=True)
    with Writer.open(root / "ticks", region_bytes=4096, roll_bytes=4096, sync="always") as channel:
        channel.append_many(payloads(150), kind=3, timestamp_ns=range(1000, 1150))
    with Reader.open(root / "ticks", name="audit") as reader:
        for _ in range(25):
            reader.try_read()
        reader.ack(sync=True)
    for compression in ("none", "snappy", "gzip"):
        options: dict[str, Any] = {"segment_bytes": 800, "compression": compression, "keep_seconds": YEARS}
        with FileChannel.open(root / f"jobs-{compression}", sync="always", **options) as queue:
            queue.ack_rx("billing").close()
            group = queue.group("workers", lease_seconds=1000, start="earliest")
            queue.append_many(payloads())
            receiver = queue.ack_rx("billing")
            receiver.recv_many(10)
            receiver.ack()
            jobs = group.take_many(5)
            group.ack(jobs[:3])
            group.fail(jobs[3:], delay=0.0, reason="tried")
            group.close()
            queue.compact()
    with MessageLog.open(root / "ops", segment_bytes=800, sync="always") as log:
        log.append_many(payloads(), sender=ANN, timestamp_ns=10**18)
    with MessageLog.open(root / "changes", content="envelope/1", sync="always") as log:
        log.append_many(changes(), timestamp_ns=10**18)
    stores: dict[str, Any] = {"append-log": AppendLogStore, "lmdb": LmdbStore, "rocksdb": RocksStore}
    for backend, kind in stores.items():
        with kind.open(root / f"store-{backend}") as store:
            store.apply([KvUpdate.put(f"k{n:02}", b"v%d" % n, n + 1) for n in range(20)], WatchCursor.of(20))
            store.apply([KvUpdate.delete("k03")], WatchCursor.of(21))
            if backend == "append-log":
                export_store(store, root / "artifact")
    asyncio.run(_make_on_loop(root))
    with Shipper(root / "ops", object_store_for(root / "up"), node="edge-1", options=ShipOptions(page_entries=2)) as up:
        while up.step():
            pass
    for name in ("LOG", "LOCK"):  # what RocksDB says of the machine
        (root / "store-rocksdb" / name).unlink(missing_ok=True)
    stream = PenstockSource({"path": str(root / "ticks")}).streamReader(StructType().add("payload", BinaryType()))
    assert isinstance(stream, LogStreamReader)
    offset = stream.latestOffset(stream.initialOffset(), ReadMaxRows(100))
    (root / "spark-offset.json").write_text(json.dumps(offset))
    stream.stop()


async def _make_on_loop(root: Path) -> None:
    connection = EmbeddedConnection(str(root / "buckets"), sync="always", checkpoint_bytes=400)
    await connection.connect()
    bucket = await connection.store_with_config(StoreConfig(name="state", history=3, max_age_seconds=YEARS))
    for number in range(60):
        await bucket.writer.put(f"k{number % 20:02}", b"v%d" % number)
    for key in range(0, 20, 7):
        await bucket.writer.delete(f"k{key:02}")
    await bucket.writer.put_with_ttl("lease", b"held", YEARS)
    await connection.shutdown()
    with open_log(root / "changes") as log, AppendLogStore.open(root / "fold.snap") as store:
        await follow(log, store, once=True)
    async with await ChannelManager.open(str(root / "channels")) as manager:
        room, jobs = manager.channel("room"), manager.channel("jobs")
        for channel, kind in ((room, "pubsub"), (jobs, "fifo")):
            await channel.join(ANN)
            await channel.configure(ANN, persist=True, type=kind, max_persist_messages=40)
        await room.broadcast_many(ANN, payloads(20))
        await room.allow(ANN, "publish", [ANN])
        for payload in payloads(5):
            await jobs.push(ANN, payload)
        await jobs.pop(ANN)


def main() -> None:
    """Make the archive of a release."""
    (release,) = sys.argv[1:]
    target = ARCHIVES / f"{release}.tar.gz"
    if target.exists():
        sys.exit(f"{target} is there: the files of a release do not change")
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / release)
        with tarfile.open(target, "w:gz") as archive:
            archive.add(Path(folder) / release, release, filter=_anonymous)
    print(f"{target}: {target.stat().st_size} bytes")


def _anonymous(found: tarfile.TarInfo) -> tarfile.TarInfo:
    found.uid = found.gid = 0
    found.uname = found.gname = ""
    return found


if __name__ == "__main__":
    main()
