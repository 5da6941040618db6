"""How fast is a channel between two processes, against what else Python has for that?

Peers, in the same run on the same machine: multiprocessing.Queue, faster-fifo, pyzmq over ipc, iceoryx2.
Every figure is the best of a few turns; latency is one way, from just before the send to just after the receive,
with both sides spinning.

    python bench/xchannel.py [--quick] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import resource
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import _table
from penstock.log.xchannel import Reader, Writer

SPAWN = multiprocessing.get_context("spawn")
STAMP = struct.Struct("<q")
GAP_NS = 20_000
MANY = 10_000
ROLLING_BYTES = 600  # 100,000 of them fill 59 files of 1 MiB


# --- Peers: each is (make(folder, size), producer, consumer) with small send/receive closures


class Penstock:
    name = "penstock"
    region_bytes, roll_bytes = 4 << 20, 64 << 20

    def __init__(self, folder: str, size: int) -> None:
        self.path, self.size = os.path.join(folder, "channel"), size
        Writer.precreate(self.path, region_bytes=self.region_bytes)

    def sender(self) -> tuple[Callable[[bytes], object], Callable[[list[bytes]], object]]:
        writer = Writer.open(self.path, roll_bytes=self.roll_bytes, keep_files=16)
        return writer.append, writer.append_many

    def receiver(self) -> tuple[Callable[[], Any], Callable[[], int]]:
        reader = Reader.open(self.path)

        def one() -> Any:
            while (record := reader.try_read()) is None:
                reader.wait(0.001)
            return record.payload

        def many() -> int:
            batch = reader.read_batch()
            if not len(batch):
                reader.wait(0.001)
            return len(batch)

        return one, many

    def spinner(self) -> Callable[[], Any]:
        reader = Reader.open(self.path, "latest")
        take = reader.try_read

        def one() -> Any:
            while (record := take()) is None:
                pass
            return record.payload

        return one


class Rolling(Penstock):
    """A channel of small regions and files, so that a short run crosses many of both."""

    region_bytes, roll_bytes = 64 << 10, 1 << 20


class MultiprocessingQueue:
    name = "multiprocessing.Queue"

    def __init__(self, folder: str, size: int) -> None:
        self.queue = SPAWN.Queue()

    def sender(self) -> tuple[Callable[[bytes], object], Callable[[list[bytes]], object]]:
        put = self.queue.put
        return put, lambda payloads: [put(payload) for payload in payloads]

    def receiver(self) -> tuple[Callable[[], Any], Callable[[], int]]:
        get = self.queue.get

        def many() -> int:
            get()
            return 1

        return get, many

    def spinner(self) -> Callable[[], Any]:
        def one() -> Any:
            while True:
                try:
                    return self.queue.get_nowait()
                except queue.Empty:
                    pass

        return one


class FasterFifo:
    name = "faster-fifo"

    def __init__(self, folder: str, size: int) -> None:
        import faster_fifo

        # bytes go through as they are: no pickling, which is the fastest it can do
        self.queue = faster_fifo.Queue(max_size_bytes=64 << 20, loads=bytes, dumps=bytes)

    def sender(self) -> tuple[Callable[[bytes], object], Callable[[list[bytes]], object]]:
        def one(payload: bytes) -> None:
            while True:
                try:
                    return self.queue.put(payload, timeout=10)
                except queue.Full:
                    pass

        def many(payloads: list[bytes]) -> None:
            for at in range(0, len(payloads), 1000):
                while True:
                    try:
                        self.queue.put_many(payloads[at : at + 1000], timeout=10)
                        break
                    except queue.Full:
                        pass

        return one, many

    def receiver(self) -> tuple[Callable[[], Any], Callable[[], int]]:
        def many() -> int:
            try:
                return len(self.queue.get_many(timeout=1, max_messages_to_get=MANY))
            except queue.Empty:
                return 0

        return lambda: self.queue.get(timeout=10), many

    def spinner(self) -> Callable[[], Any]:
        def one() -> Any:
            while True:
                try:
                    return self.queue.get_nowait()
                except queue.Empty:
                    pass

        return one


class ZeroMq:
    name = "pyzmq ipc"

    def __init__(self, folder: str, size: int) -> None:
        self.address = f"ipc://{folder}/socket"

    def sender(self) -> tuple[Callable[[bytes], object], Callable[[list[bytes]], object]]:
        import zmq

        socket = zmq.Context.instance().socket(zmq.PUSH)
        socket.set_hwm(100_000)
        socket.connect(self.address)
        self.socket = socket
        return socket.send, lambda payloads: [socket.send(payload) for payload in payloads]

    def receiver(self) -> tuple[Callable[[], Any], Callable[[], int]]:
        import zmq

        socket = zmq.Context.instance().socket(zmq.PULL)
        socket.set_hwm(100_000)
        socket.bind(self.address)

        def many() -> int:
            socket.recv()
            return 1

        return socket.recv, many

    def spinner(self) -> Callable[[], Any]:
        import zmq

        socket = zmq.Context.instance().socket(zmq.PULL)
        socket.bind(self.address)

        def one() -> Any:
            while True:
                try:
                    return socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    pass

        return one


class Iceoryx2:
    name = "iceoryx2"

    def __init__(self, folder: str, size: int) -> None:
        self.size = size
        self.service_name = "penstock-bench-" + os.path.basename(folder)

    def _service(self) -> Any:
        import ctypes

        import iceoryx2 as iox2

        iox2.set_log_level(iox2.LogLevel.Error)
        self.kind = ctypes.c_uint8
        self.node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        return (
            self.node.service_builder(iox2.ServiceName.new(self.service_name))
            .publish_subscribe(iox2.Slice[self.kind])
            .subscriber_max_buffer_size(8192)
            .enable_safe_overflow(False)
            .open_or_create()
        )

    def sender(self) -> tuple[Callable[[bytes], object], Callable[[list[bytes]], object]]:
        import ctypes

        self.service = self._service()
        self.publisher = self.service.publisher_builder().initial_max_slice_len(self.size).create()

        def one(payload: bytes) -> None:
            sample = self.publisher.loan_slice_uninit(len(payload))
            ctypes.memmove(sample.payload_ptr, payload, len(payload))
            sample.assume_init().send()

        return one, lambda payloads: [one(payload) for payload in payloads]

    def receiver(self) -> tuple[Callable[[], Any], Callable[[], int]]:
        one = self.spinner()

        def many() -> int:
            one()
            return 1

        return one, many

    def spinner(self) -> Callable[[], Any]:
        import ctypes

        self.service = self._service()
        self.subscriber = self.service.subscriber_builder().buffer_size(8192).create()

        def one() -> Any:
            while (sample := self.subscriber.receive()) is None:
                pass
            return ctypes.string_at(sample.payload_ptr, self.size)

        return one


PEERS = (Penstock, MultiprocessingQueue, FasterFifo, ZeroMq, Iceoryx2)


# --- What is measured


def consume(peer: Any, count: int, batched: bool, ready: Any, answer: Any) -> None:
    """Receive ``count`` messages and say when the last one came."""
    one, many = peer.receiver()
    ready.set()
    got = 0
    if batched:
        while got < count:
            got += many()
    else:
        for _ in range(count):
            one()
    answer.put(time.monotonic())


def throughput(peer_class: Any, size: int, count: int, batched: bool, folder: str) -> tuple[float, float]:
    """Return (sent per second as the sender sees it, per second from first send to last receive)."""
    room = tempfile.mkdtemp(dir=folder)
    try:
        peer = peer_class(room, size)
        ready, answer = SPAWN.Event(), SPAWN.Queue()
        process = SPAWN.Process(target=consume, args=(peer, count, batched, ready, answer), daemon=True)
        process.start()
        ready.wait(30)
        one, many = peer.sender()
        payload = bytes(size)
        time.sleep(0.2)
        begin = time.monotonic()
        if batched:
            chunk = [payload] * MANY
            for _ in range(count // MANY):
                many(chunk)
        else:
            for _ in range(count):
                one(payload)
        sent = time.monotonic()
        end = answer.get(timeout=300)
        process.join(10)
        return count / (sent - begin), count / (end - begin)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def echo_times(peer: Any, count: int, ready: Any, answer: Any) -> None:
    """Note how long each message was on its way."""
    one = peer.spinner()
    ready.set()
    late = np.empty(count, np.int64)
    now, unpack = time.monotonic_ns, STAMP.unpack_from
    for index in range(count):
        payload = one()
        late[index] = now() - unpack(payload)[0]
    answer.put(late.tobytes())


def latency(peer_class: Any, size: int, count: int, folder: str) -> tuple[np.ndarray, list[Any]]:
    """Return the one-way times of messages sent at a fixed spacing, in nanoseconds, and what sending them returned."""
    room = tempfile.mkdtemp(dir=folder)
    try:
        peer = peer_class(room, size)
        ready, answer = SPAWN.Event(), SPAWN.Queue()
        process = SPAWN.Process(target=echo_times, args=(peer, count, ready, answer), daemon=True)
        process.start()
        ready.wait(30)
        send, _ = peer.sender()
        time.sleep(0.3)
        rest = bytes(size - STAMP.size)
        now, pack = time.monotonic_ns, STAMP.pack
        due, sent = now(), []
        note = sent.append
        for _ in range(count):
            due += GAP_NS
            while now() < due:
                pass
            note(send(pack(now()) + rest))
        late = np.frombuffer(answer.get(timeout=120), np.int64)
        process.join(10)
        return late[count // 20 :], sent[count // 20 :]
    finally:
        shutil.rmtree(room, ignore_errors=True)


def rolling_latency(count: int, folder: str) -> tuple[list[tuple[str, ...]], dict[str, Any]]:
    """Return a row for all messages of a run over many files, one for those that began a region, one for a file."""
    late, positions = latency(Rolling, ROLLING_BYTES, count, folder)
    places = np.array(positions)
    files, regions = places >> 40, places // Rolling.region_bytes  # 2^40 is a whole number of regions
    new_file = np.diff(files, prepend=files[0]) != 0
    new_region = (np.diff(regions, prepend=regions[0]) != 0) & ~new_file
    rows, figures = [], {}
    for name, chosen in (
        ("all", np.ones(len(late), bool)),
        ("first of a region", new_region),
        ("first of a file", new_file),
    ):
        marks = np.percentile(late[chosen], (50, 90, 99, 99.9)) / 1000 if chosen.any() else []
        figures[name] = {"messages": int(chosen.sum()), "µs": list(marks)}
        rows.append((name, f"{int(chosen.sum()):,}", *(f"{mark:.1f}" for mark in marks)))
    return rows, figures


def alone(size: int, folder: str, seconds: float) -> dict[str, float]:
    """Return what one process does by itself: appending and reading, and the page faults below it."""
    room = tempfile.mkdtemp(dir=folder)
    path = os.path.join(room, "channel")
    payload, chunk = bytes(size), [bytes(size)] * MANY
    found = {}
    try:
        with Writer.open(path, region_bytes=4 << 20, roll_bytes=64 << 20, keep_files=3) as writer:
            append = writer.append
            found["append"] = repeat(seconds, 1000, lambda: [append(payload) for _ in range(1000)])
            found["append_many"] = repeat(seconds, MANY, lambda: writer.append_many(chunk))
            from penstock.batch import Batch

            batch = Batch.of(chunk)
            found["append_many of a Batch"] = repeat(seconds, MANY, lambda: writer.append_many(batch))
        records, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            with Reader.open(path) as reader:
                while count := len(reader.read_batch()):
                    records += count
        found["read_batch"] = records / (time.perf_counter() - begin)
        with Reader.open(path) as reader:
            records, begin = 0, time.perf_counter()
            while reader.try_read() is not None and records < 2_000_000:
                records += 1
            found["try_read"] = records / (time.perf_counter() - begin)
        found["(copying the same bytes into a fresh mapped file)"] = bare_copy(room, size, seconds)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    return found


def bare_copy(room: str, size: int, seconds: float) -> float:
    """Return records per second of plain copies into new file pages: what the machine allows."""
    import mmap

    stride = (16 + size + 7) // 8 * 8
    block = bytes(1 << 20)
    records, begin = 0.0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        with open(os.path.join(room, "bare"), "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, 64 << 20)
            view = mmap.mmap(file.fileno(), 64 << 20)
            for at in range(0, 64 << 20, 1 << 20):
                view[at : at + (1 << 20)] = block
            view.close()
        os.unlink(os.path.join(room, "bare"))
        records += (64 << 20) / stride
    return records / (time.perf_counter() - begin)


def repeat(seconds: float, records: int, work: Callable[[], object]) -> float:
    turns, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        work()
        turns += 1
    return turns * records / (time.perf_counter() - begin)


def drain(path: str, total: int, place: Any, samples: Any) -> None:
    """Read ``total`` records, noting the file it is in and the resident memory as it goes."""
    got, noted = 0, [resident()]
    with Reader.open(path) as reader:
        while got < total:
            batch = reader.read_batch()
            got += len(batch)
            if not len(batch):
                reader.wait(0.01)
            place.value = reader.file_sequence
            noted.append(resident())
    samples.put(noted)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def flat_memory(folder: str, total_bytes: int) -> dict[str, float]:
    """Write and read ``total_bytes`` through rolling files; return the memory of both sides in MiB."""
    room = tempfile.mkdtemp(dir=folder)
    path = os.path.join(room, "channel")
    size = 4096
    turns = total_bytes // size // 1000
    chunk = [bytes(size)] * 1000
    samples, place = SPAWN.Queue(), SPAWN.Value("q", 0)
    try:
        with Writer.open(path, region_bytes=4 << 20, roll_bytes=64 << 20, keep_files=8) as writer:
            process = SPAWN.Process(target=drain, args=(path, turns * 1000, place, samples), daemon=True)
            process.start()
            time.sleep(1)
            own, begin = [], time.perf_counter()
            for _ in range(turns):
                writer.append_many(chunk)
                own.append(resident())
                while writer.file_sequence > place.value + 4:  # so that retention does not overtake the reader
                    time.sleep(0.001)
            took = time.perf_counter() - begin
        theirs = samples.get(timeout=600)
        process.join(10)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    return {
        "GiB": total_bytes / 2**30,
        "GB/s": total_bytes / took / 1e9,
        "writer, first quarter, MiB": max(own[: len(own) // 4 + 1]) / 2**20,
        "writer, at most, MiB": max(own) / 2**20,
        "reader, first quarter, MiB": max(theirs[: len(theirs) // 4 + 1]) / 2**20,
        "reader, at most, MiB": max(theirs) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run of a few seconds; its figures mean little")
    parser.add_argument("--folder", help="where the channels are; the temporary folder if not given")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    quick = options.quick
    sizes = (64,) if quick else (64, 256, 4096)
    sections, figures = [], {"machine": _table.machine()}

    by_itself = {size: alone(size, options.folder, 0.1 if quick else 2.0) for size in sizes}
    figures["alone"] = by_itself
    sections.append("One process by itself, records a second:\n")
    calls = list(by_itself[sizes[0]])
    sections.append(
        _table.markdown(
            ("call", *(f"{size} B" for size in sizes)),
            [(call, *(_table.rate(by_itself[size][call]) for size in sizes)) for call in calls],
        )
    )

    for batched in (False, True):
        rows, base = [], {}
        for peer in PEERS:
            cells = []
            for size in sizes:
                count = (20_000 if quick else 400_000 if size < 4096 else 100_000) * (5 if batched else 1)
                if peer in (MultiprocessingQueue, Iceoryx2) or (peer is ZeroMq and batched):
                    count = min(count, 20_000 if quick else 200_000)
                turns = [
                    throughput(peer, size, count // MANY * MANY, batched, options.folder)
                    for _ in range(1 if quick else 3)
                ]
                sent, received = max(turn[0] for turn in turns), max(turn[1] for turn in turns)
                base.setdefault(size, received)
                figures[f"{peer.name} {size} {'batched' if batched else 'single'}"] = (sent, received)
                cells.append(f"{_table.rate(received)} ({base[size] / received:.1f}×)")
            rows.append((peer.name, *cells))
        how = "in batches" if batched else "one at a time"
        sections.append(f"\nTwo processes, {how}, first send to last receive (penstock is that many times faster):\n")
        sections.append(_table.markdown(("", *(f"{size} B" for size in sizes)), rows))

    rows = []
    for peer in PEERS:
        count = 2_000 if quick else 100_000
        if peer is MultiprocessingQueue:
            count = min(count, 20_000)
        late, _ = latency(peer, 64, count, options.folder)
        marks = np.percentile(late, (50, 90, 99, 99.9)) / 1000
        figures[f"{peer.name} latency µs"] = marks.tolist()
        rows.append((peer.name, *(f"{mark:.1f}" for mark in marks)))
    sections.append(f"\nOne way, 64 B every {GAP_NS // 1000} µs, both sides spinning, µs:\n")
    sections.append(_table.markdown(("", "p50", "p90", "p99", "p99.9"), rows))
    rows, figures["rolling latency"] = rolling_latency(5_000 if quick else 100_000, options.folder)
    sections.append(
        f"\nThe same, {ROLLING_BYTES} B, over regions of {Rolling.region_bytes >> 10} KiB and files of "
        f"{Rolling.roll_bytes >> 20} MiB: the messages that crossed into a new one by themselves, µs:\n"
    )
    sections.append(_table.markdown(("messages", "how many", "p50", "p90", "p99", "p99.9"), rows))
    figures["memory"] = memory = flat_memory(options.folder, (64 << 20) if quick else (10 << 30))
    sections.append("\nMemory over a long run (4 KiB records, 64 MiB files):\n")
    sections.append(
        _table.markdown(
            ("GiB", *list(memory)[1:]), [(f"{memory['GiB']:.2f}", *(f"{v:.1f}" for v in list(memory.values())[1:]))]
        )
    )
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    print("\n".join([f"Channels on {options.folder or 'the temporary folder'}.\n", *sections]))


if __name__ == "__main__":
    main()
