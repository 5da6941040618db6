"""What operations cost against how many files, receivers, keys or channels there are: time, and the exponent.

python bench/growth.py [--quick] [--largest N] [--only NAME]

An exponent of 0 means that the cost does not depend on the number, 1 that it grows in proportion; it is taken between
the two largest sizes, where constants count least.  Times are those of the processor, all threads together, so that a
busy machine and a slow disk do not show.  What a send, a roll, a put or a get pays should be near 0, what
looks at everything (open, verify, read all) at 1 or below.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.channels import ChannelManager, Limits
from penstock.kv import EmbeddedConnection, EmbeddedOptions, StoreConfig
from penstock.log.face import LogReader
from penstock.log.filechannel import ChannelOptions, FileChannel, FileChannelLog
from penstock.log.find import find_logs
from penstock.log.messagelog import MessageLog, MessageLogOptions, MessageLogReader
from penstock.log.xchannel import Reader, Writer, XChannelLog
from penstock.mqtt import Broker
from penstock.store import AppendLogStore
from penstock.types import KvUpdate, WatchCursor

Times = dict[str, float]
PAYLOAD = b"x" * 190


@contextmanager
def folder() -> Iterator[str]:
    """A folder for one measurement."""
    path = tempfile.mkdtemp(prefix="growth-")
    try:
        yield path
    finally:
        shutil.rmtree(path)


def took(work: Callable[[], object], times: int = 1) -> float:
    """Return how long one call takes, in milliseconds: the median of its calls."""
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return statistics.median(found) * 1000


def read_all(log: LogReader) -> int:
    """Read a log to its end."""
    position, records = log.first_position, 0
    while len(batch := log.read(position)):
        position, records = batch.next_position, records + len(batch)
    return records


def queue_segments(count: int) -> Times:
    """A queue of that many sealed segments."""
    options = ChannelOptions(sync="none", segment_bytes=180, compression="none", keep_bytes=1 << 40)
    with folder() as path:
        with FileChannel.open(path, options) as channel:
            channel.append_many([PAYLOAD] * count)
        found: Times = {}
        began = time.process_time()
        with FileChannel.open(path, options) as channel:
            found["open"] = (time.process_time() - began) * 1000
            found["send and roll, keep_bytes"] = took(lambda: channel.append(PAYLOAD), 50)
            found["named receiver: open, receive, ack"] = took(lambda: _receive(channel), 3)
            channel.forget("growth")
        with FileChannelLog(path) as log:
            found["read one in the middle"] = took(lambda: log.read(count // 2 * 198, 1), 9)
            found["verify"] = took(lambda: list(log.verify()))
            found["read all"] = took(lambda: read_all(log))
        lower = ChannelOptions(
            sync="none", segment_bytes=180, compression="none", keep_bytes=10_000, policy="drop_oldest"
        )
        with FileChannel.open(path, lower) as channel:
            found["first send after lowering keep_bytes"] = took(lambda: channel.append(PAYLOAD))
        return found


def _receive(channel: FileChannel) -> None:
    receiver = channel.ack_rx("growth")
    receiver.recv()
    receiver.ack()
    receiver.close()


def queue_receivers(count: int) -> Times:
    """A queue with that many named receivers that are away."""
    options = ChannelOptions(sync="none", segment_bytes=180, compression="none")
    with folder() as path, FileChannel.open(path, options) as channel:
        channel.append(PAYLOAD)
        for number in range(count):
            channel.ack_rx(f"r{number}").close()
        channel.append(PAYLOAD)
        found = {"send and roll, all behind": took(lambda: channel.append(PAYLOAD), 50)}
        few = min(count, 500)  # as many as a process may open files for
        before = len(os.listdir("/proc/self/fd"))
        receivers = [channel.ack_rx(f"r{number}") for number in range(few)]
        found["descriptors of an open receiver"] = (len(os.listdir("/proc/self/fd")) - before) / few
        for receiver in receivers:
            receiver.close()
        return found


def queue_groups(count: int) -> Times:
    """A queue with that many groups that are away."""
    options = ChannelOptions(sync="none", segment_bytes=180, compression="none")
    with folder() as path, FileChannel.open(path, options) as channel:
        channel.append(PAYLOAD)
        for number in range(count):
            group = channel.group(f"g{number}")
            group.ack(group.take_many(1))
            group.close()
        channel.append(PAYLOAD)
        found = {"send and roll, all behind": took(lambda: channel.append(PAYLOAD), 50)}
        found["open a group, take, ack"] = took(lambda: _take(channel), 9)
        return found


def _take(channel: FileChannel) -> None:
    group = channel.group("g0")
    group.ack(group.take_many(1))
    group.close()


def log_segments(count: int) -> Times:
    """A message log of that many segments."""
    options = MessageLogOptions(sync="none", segment_bytes=200)
    with folder() as path:
        with MessageLog.open(path, options) as log:
            log.append_many([PAYLOAD] * count)
        found: Times = {}
        began = time.process_time()
        with MessageLog.open(path, options) as log:
            found["open"] = (time.process_time() - began) * 1000
            found["append and roll"] = took(lambda: log.append(PAYLOAD), 50)
        with MessageLogReader(path) as reader:
            found["read one in the middle"] = took(lambda: reader.read(count // 2, 1), 9)
            found["verify"] = took(lambda: list(reader.verify()))
            found["read all"] = took(lambda: read_all(reader))
        kept = MessageLogOptions(sync="none", segment_bytes=200, max_messages=count)
        with MessageLog.open(path, kept) as log:
            found["append and roll, max_messages"] = took(lambda: log.append(PAYLOAD), 50)
        with MessageLog.open(path, options) as log:
            found["drop all"] = took(lambda: log.drop_before(1 << 60))
        return found


def channel_files(count: int) -> Times:
    """A channel of that many files."""
    with folder() as root:
        path = root + "/ticks"
        with Writer.open(path, region_bytes=4096, roll_bytes=4096) as writer:
            for _ in range(count):
                writer.append(PAYLOAD)
                writer.roll()
        found: Times = {}
        began = time.process_time()
        with Writer.open(path, region_bytes=4096, roll_bytes=4096) as writer:
            found["open"] = (time.process_time() - began) * 1000
            writer.append(PAYLOAD)
            found["append and roll"] = took(lambda: (writer.roll(), writer.append(PAYLOAD)), 50)
        with Writer.open(path, region_bytes=4096, roll_bytes=4096, keep_files=count) as writer:
            found["append and roll, keep_files"] = took(lambda: (writer.append(PAYLOAD), writer.roll()), 50)
        with XChannelLog(path) as log:
            middle = log.first_position + (count // 2 << 40)
            found["read one in the middle"] = took(lambda: log.read(middle, 1), 9)
            found["verify"] = took(lambda: list(log.verify()))
            found["read all"] = took(lambda: read_all(log))
        found["reader: open at the end"] = took(lambda: Reader.open(path, "latest").close(), 9)
        return found


def bucket_keys(count: int) -> Times:
    """A bucket of that many keys."""
    options = EmbeddedOptions(sync="none")

    async def work(path: str) -> Times:
        connection = EmbeddedConnection(path, options)
        await connection.connect()
        bucket = await connection.store_with_config(StoreConfig(name="state", max_bytes=-1))
        await bucket.writer.put_many((f"k{number}", b"v" * 50) for number in range(count))
        await connection.shutdown()
        connection = EmbeddedConnection(path, options)
        await connection.connect()
        began = time.process_time()
        bucket = await connection.store("state")
        await bucket.reader.get("k0")
        found = {"open, and the first get": (time.process_time() - began) * 1000}
        await bucket.writer.put("warm", b"up")
        found["put"] = await _median(lambda: bucket.writer.put("k1", b"w" * 50), 200)
        found["get"] = await _median(lambda: bucket.reader.get("k1"), 200)
        found["keys"] = await _median(bucket.reader.keys, 3)
        watch = await bucket.watcher.watch_all()
        while not watch.hydrated:
            await watch.next_batch()

        async def seen() -> None:
            await bucket.writer.put("k2", b"w" * 50)
            await watch.next_batch()

        found["put, and the watch has it"] = await _median(seen, 20)
        await watch.aclose()
        await connection.shutdown()
        return found

    async def expired(path: str) -> Times:
        connection = EmbeddedConnection(path, options)
        await connection.connect()
        bucket = await connection.store_with_config(StoreConfig(name="leases", max_bytes=-1))
        places = [bucket.writer.put_with_ttl(f"k{number}", b"v" * 50, 1.0) for number in range(count)]
        for start in range(0, count, 1000):
            await asyncio.gather(*places[start : start + 1000])
        await asyncio.sleep(1.1)
        found = {"first put after all have expired": await _median(lambda: bucket.writer.put("new", b"v"), 1)}
        await connection.shutdown()
        return found

    with folder() as path:
        return asyncio.run(work(path)) | asyncio.run(expired(path + "/expired"))


async def _median(call: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(times):
        began = time.process_time()
        await call()  # type: ignore[misc]
        found.append(time.process_time() - began)
    return statistics.median(found) * 1000


def store_keys(count: int) -> Times:
    """An append log of that many keys."""
    with folder() as root:
        path = root + "/fold.snap"
        with AppendLogStore.open(path, sync="none") as store:
            store.apply([KvUpdate.put(f"k{number}", b"v" * 50, number + 1) for number in range(count)], WatchCursor())
            found = {
                "apply of one": took(lambda: store.apply([KvUpdate.put("k1", b"w", 1)], WatchCursor.of(1)), 200),
                "get": took(lambda: store.get("k1"), 200),
                "scan": took(lambda: sum(map(len, store.scan())), 3),
                "compact": took(store.compact),
            }
        found["open"] = took(lambda: AppendLogStore.open(path).close())
        return found


def many_channels(count: int) -> Times:
    """That many persistent channels with a member and a message each."""

    async def work(path: str) -> Times:
        async with await ChannelManager.open(path, limits=Limits(max_channels=2 * count)) as manager:
            for start in range(0, count, 100):
                await asyncio.gather(*(_fill(manager, number) for number in range(start, min(count, start + 100))))
        began = time.process_time()
        async with await ChannelManager.open(path, limits=Limits(max_channels=2 * count)) as manager:
            found = {"open": (time.process_time() - began) * 1000}
            room = manager.channel("room0")
            found["broadcast"] = await _median(lambda: room.broadcast("u0@localhost", b"hello"), 20)
            found["history"] = await _median(lambda: room.history("u0@localhost", 1, 1), 20)
        return found

    async def _fill(manager: ChannelManager, number: int) -> None:
        room, who = manager.channel(f"room{number}"), f"u{number}@localhost"
        await room.join(who)
        await room.configure(who, persist=True, max_persist_messages=10)
        await room.broadcast(who, b"hello")

    with folder() as path:
        return asyncio.run(work(path))


def folder_of_logs(count: int) -> Times:
    """A folder of that many channels with a record each."""
    with folder() as path:
        Path(path, "logs").mkdir()
        for number in range(count):
            with Writer.open(f"{path}/logs/c{number}", region_bytes=4096, roll_bytes=4096) as writer:
                writer.append(PAYLOAD)
        return {"find all": took(lambda: list(find_logs(path + "/logs")), 3)}


def broker_topics(count: int) -> Times:
    """A broker with that many retained messages, each of its own topic."""
    broker = Broker()
    for number in range(count):
        broker.publish_message(f"plant/{number % 100}/{number}", b"on", retain=True)
    return {"publish": took(lambda: broker.publish_message("plant/7/7", b"off", retain=True), 200)}


CASES = {
    "queue, segments": queue_segments,
    "queue, receivers": queue_receivers,
    "queue, groups": queue_groups,
    "message log, segments": log_segments,
    "channel, files": channel_files,
    "bucket, keys": bucket_keys,
    "append log, keys": store_keys,
    "channels with members": many_channels,
    "folder of channels": folder_of_logs,
    "broker, retained": broker_topics,
}


def main() -> None:
    """Print a table of every case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--largest", type=int, default=10_000)
    parser.add_argument("--only", default="")
    logging.disable(logging.WARNING)  # that unread messages go is what was asked for
    arguments = parser.parse_args()
    sizes = [30, 300] if arguments.quick else [n for n in (100, 1000, 10_000, 100_000) if n <= arguments.largest]
    print("| what | operation | " + " | ".join(f"{size:,}" for size in sizes) + " | exponent |")
    print("|---|---|" + "---:|" * (len(sizes) + 1))
    for name, case in CASES.items():
        if arguments.only not in name:
            continue
        rows = [case(size) for size in sizes]
        for operation in rows[0]:
            values = [row[operation] for row in rows]
            if operation.startswith("descriptors"):
                cells, exponent = [f"{value:.1f}" for value in values], ""
            else:
                cells = [f"{value:,.3f} ms" for value in values]
                exponent = f"{math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2]):.2f}"
            print(f"| {name} | {operation} | {' | '.join(cells)} | {exponent} |", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
