"""How fast is the queue, one message at a time and in batches, against queues people use from Python?

    python bench/filechannel.py [--quick] [--sizes 64 512] [--folder DIR] [--json]

Every queue writes N messages into a fresh folder and reads them back, in this process, in one run on this machine.  All
are measured the way they come: no queue here syncs each message except where the table says so.  The ceiling is a plain
file that gets as many bytes in pieces of a mebibyte.  persist-queue and
diskcache are in the dependency group ``bench``.  The Go library's figures are quoted from its README (MacBook Pro M1
Pro), not measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence

from penstock.batch import Batch
from penstock.log.filechannel import ChannelOptions, FileChannel

SIZES = (16, 64, 512, 4096)
GO_NS = {16: (63.36, 132.7), 64: (140.5, 146.0), 512: (817.6, 303.7)}  # write, read; quoted
BATCH = 10_000

Seconds = tuple[float, float]


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def one_by_one(put: Callable[[bytes], object], get: Callable[[], object], payload: bytes, count: int) -> Seconds:
    def write() -> None:
        for _ in range(count):
            put(payload)

    def read() -> None:
        for _ in range(count):
            get()

    return timed(write), timed(read)


def penstock_one(folder: str, payload: bytes, count: int, sync: str = "none") -> Seconds:
    with FileChannel.open(folder, ChannelOptions(sync=sync, compression="none")) as channel:  # type: ignore[arg-type]
        return one_by_one(channel.tx().send, channel.rx().recv, payload, count)


def penstock_interval(folder: str, payload: bytes, count: int) -> Seconds:
    return penstock_one(folder, payload, count, "interval")


def penstock_acked(folder: str, payload: bytes, count: int) -> Seconds:
    """Each message is acknowledged by itself, in the file of a named receiver."""
    with FileChannel.open(folder, ChannelOptions(sync="none", compression="none")) as channel:
        rx = channel.ack_rx("bench")

        def work() -> None:
            rx.recv()
            rx.ack()

        return one_by_one(channel.tx().send, work, payload, count)


def penstock_asyncio(folder: str, payload: bytes, count: int) -> Seconds:
    with FileChannel.open(folder, ChannelOptions(sync="none", compression="none")) as channel:
        tx, rx = channel.tx(), channel.rx()

        async def write() -> None:
            for _ in range(count):
                await tx.asend(payload)

        async def read() -> None:
            for _ in range(count):
                await rx.arecv()

        return timed(lambda: asyncio.run(write())), timed(lambda: asyncio.run(read()))


def penstock_many(
    folder: str, payload: bytes, count: int, taken: Callable[[Batch], Sequence[object]] = lambda batch: batch
) -> Seconds:
    with FileChannel.open(folder, ChannelOptions(sync="none", compression="none")) as channel:
        tx, rx, batch = channel.tx(), channel.rx(), [payload] * min(BATCH, count)

        def write() -> None:
            for _ in range(count // len(batch)):
                tx.send_many(batch)

        def read() -> None:
            left = count // len(batch) * len(batch)
            while left:
                left -= len(taken(rx.recv_many(BATCH)))

        return timed(write), timed(read)


def penstock_list(folder: str, payload: bytes, count: int) -> Seconds:
    """Batches, each message as a bytes object of its own at the end."""
    return penstock_many(folder, payload, count, Batch.to_payloads)


def persist_file(folder: str, payload: bytes, count: int) -> Seconds:
    import persistqueue

    queue = persistqueue.Queue(folder, autosave=True)
    return one_by_one(queue.put, queue.get, payload, count)


def persist_sqlite(folder: str, payload: bytes, count: int) -> Seconds:
    import persistqueue

    queue = persistqueue.SQLiteQueue(folder, auto_commit=True)
    result = one_by_one(queue.put, queue.get, payload, count)
    queue.close()
    return result


def disk_deque(folder: str, payload: bytes, count: int) -> Seconds:
    import diskcache

    deque = diskcache.Deque(directory=folder)
    result = one_by_one(deque.append, deque.popleft, payload, count)
    deque._cache.close()
    return result


def plain_file(folder: str, payload: bytes, count: int) -> Seconds:
    """As many bytes through write and read of one file, a mebibyte at a time, without a message in them."""
    chunk, total = bytes(1 << 20), count * (len(payload) + 8)
    with open(folder, "w+b", buffering=0) as file:

        def write() -> None:
            file.writelines(chunk[: total - start] for start in range(0, total, len(chunk)))

        def read() -> None:
            file.seek(0)
            while file.read(len(chunk)):
                pass

        return timed(write), timed(read)


def opening(quick: bool, where: str | None) -> str:
    """Say what opening a channel of 10 GiB reads: the files are sparse, but a reader of them would not notice."""
    from penstock.disk import PosixDisk
    from penstock.log.filechannel.format import Header, segment_path
    from penstock.testing.faulty import FaultyDisk

    options = ChannelOptions(compression="none")
    segment, count = (1 << 20, 4) if quick else (512 << 20, 20)
    folder = tempfile.mkdtemp(prefix="penstock-bench-", dir=where)
    try:
        for index in range(count):
            with open(segment_path(folder, index), "wb") as file:
                file.write(Header(index, index * segment).encode())
                file.truncate(64 + segment)
        with open(segment_path(folder, count), "wb") as file:
            file.write(Header(count, count * segment).encode())
        with FileChannel.open(folder, options) as channel:
            channel.append_many([bytes(4096)] * 256)
        began, before = time.perf_counter(), bytes_read()
        channel = FileChannel.open(folder, options)
        seconds, size = time.perf_counter() - began, bytes_read() - before
        channel.close()
        disk = FaultyDisk(PosixDisk())  # it keeps a list of what is done to files
        FileChannel.open(folder, options, disk=disk).close()
        reads = ("read_at", "read_into", "map")
        segments = {path.rpartition("/")[2] for operation, path in disk.calls if operation in reads}
        names = ", ".join(sorted(name for name in segments if name.startswith("segment.")))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    gib = count * segment / (1 << 30)
    took = f"{seconds * 1000:.1f} ms, {size:,} bytes read, of its segments only {names}"
    return f"Opening a channel of {gib:.3g} GiB in {count + 1} segments: {took}."


def bytes_read() -> int:
    """Return how much this process has read so far, by the account of the operating system; 0 where there is none."""
    try:
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])
    except OSError:
        return 0


PEERS = {"persist-queue file": persist_file, "persist-queue SQLite": persist_sqlite, "diskcache.Deque": disk_deque}


def measure(
    work: Callable[..., Seconds], payload: bytes, count: int, where: str | None = None
) -> tuple[float, float, float]:
    """Return write, read and write+read in messages a second, the best of two."""
    best: list[float] = [0.0, 0.0, 0.0]
    for _ in range(2):
        folder = tempfile.mkdtemp(prefix="penstock-bench-", dir=where)
        try:
            write, read = work(folder + "/queue", payload, count)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        best = [max(a, b) for a, b in zip(best, (count / write, count / read, count / (write + read)), strict=True)]
    return best[0], best[1], best[2]


def run(quick: bool, sizes: list[int], where: str | None = None) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for size in sizes:
        payload = bytes(range(256)) * (size // 256 + 1)
        payload = payload[:size]
        many = 20_000 if quick else max(30_000, min(1_000_000, (200 << 20) // (size + 8) // BATCH * BATCH))
        one = 2_000 if quick else 50_000
        peer = 200 if quick else 500
        own = {
            "penstock, one at a time": measure(penstock_one, payload, one, where),
            "penstock, batches": measure(penstock_many, payload, many, where),
            "penstock, batches to bytes": measure(penstock_list, payload, many, where),
            "penstock, one at a time, interval sync": measure(penstock_interval, payload, one, where),
            "penstock, one at a time, acknowledged": measure(penstock_acked, payload, one, where),
            "penstock, one at a time, asyncio": measure(penstock_asyncio, payload, one, where),
        }
        peers = {name: measure(work, payload, peer, where) for name, work in PEERS.items()}
        best = max(rate[2] for rate in peers.values())
        own["plain file, no messages: the ceiling"] = measure(plain_file, payload, many, where)
        for name, rate in {**own, **peers}.items():
            rows.append(
                {"size": size, "queue": name, "write": rate[0], "read": rate[1], "both": rate[2],
                 "ratio": rate[2] / best}
            )  # fmt: skip
        if size in GO_NS:
            write, read = (1e9 / ns for ns in GO_NS[size])
            rows.append({"size": size, "queue": "filechannel (Go), quoted, M1 Pro", "write": write, "read": read,
                         "both": 1 / (1 / write + 1 / read), "ratio": None})  # fmt: skip
    return rows


def table(rows: list[dict[str, object]]) -> str:
    lines = [
        "| bytes | queue | write/s | read/s | write+read/s | times the best Python peer |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.1f}"
        rates = " | ".join(f"{row[name]:,.0f}" for name in ("write", "read", "both"))
        lines.append(f"| {row['size']} | {row['queue']} | {rates} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test: small counts, one size")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--sizes", type=int, nargs="+", help="payload bytes")
    parser.add_argument("--folder", help="where the queues are made; the temporary folder unless given")
    arguments = parser.parse_args()
    rows = run(arguments.quick, arguments.sizes or list(SIZES[1:2] if arguments.quick else SIZES), arguments.folder)
    opened = opening(arguments.quick, arguments.folder)
    print(json.dumps([*rows, {"opening": opened}]) if arguments.json else f"{table(rows)}\n\n{opened}")


if __name__ == "__main__":
    main()
