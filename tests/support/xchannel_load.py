"""Writers and readers in processes of their own, with payloads that prove themselves.

A payload begins with its number and a check word made from it, so that a lost, doubled, swapped or torn record shows
without keeping any of them.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import struct
import sys
import time
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from penstock.batch import Batch, Spans
from penstock.log.xchannel import Reader, Writer, ahead

MULTIPLIER = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
WORDS = struct.Struct("<QQ")


def processes() -> Any:
    """Return the context to start processes from: a clean server that has imported this module once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["xchannel_load"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # the server looks nowhere else
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def payload(number: int, extra: int = 0) -> bytes:
    return WORDS.pack(number, (number * MULTIPLIER) & MASK) + bytes(extra)


def payload_batch(first: int, count: int, size: int) -> Batch:
    """Return many payloads of one size at once."""
    words = np.zeros((count, size // 8), np.uint64)
    numbers = np.arange(first, first + count, dtype=np.uint64)
    words[:, 0] = numbers
    words[:, 1] = numbers * np.uint64(MULTIPLIER)
    words[:, 2:] = numbers[:, None]
    offsets = np.arange(count, dtype=np.int64) * size
    return Batch(words.tobytes(), offsets, Spans(offsets, np.full(count, size, np.int64)))


def numbers_of(batch: Batch) -> np.ndarray:
    """Return the numbers in a batch; AssertionError if a payload does not fit its number."""
    places = batch.payloads.offsets // 8  # payloads begin on multiples of 8
    words = np.frombuffer(batch.view, np.uint64)
    numbers = words[places]
    assert (words[places + 1] == numbers * np.uint64(MULTIPLIER)).all(), "a torn record"
    return numbers


def write_until_killed(path: str, seed: int, number: int, ready: Connection) -> None:
    """Append in every way there is, numbers ascending, until someone kills this process."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        ahead.SMALLEST = 1  # type: ignore[misc]  # even files and regions this small are made ready by a thread
    writer = Writer.open(path, region_bytes=4096, roll_bytes=rng.choice((16_384, 30_000)))
    ready.send(None)
    while True:
        way = rng.random()
        if way < 0.5:
            writer.append(payload(number, rng.randrange(60)), kind=number & 0xFFFF)
            number += 1
        elif way < 0.7:
            count = rng.randrange(1, 40)
            writer.append_many([payload(number + n, n % 9) for n in range(count)])
            number += count
        elif way < 0.85:
            count = rng.randrange(1, 40)
            writer.append_many(payload_batch(number, count, 32))
            number += count
        elif way < 0.99:
            data = payload(number, rng.randrange(20))
            view = writer.reserve(len(data) + rng.randrange(100))
            view[: len(data)] = data
            writer.commit(len(data))
            number += 1
        else:
            writer.roll()
        if way < 0.05:
            time.sleep(0.0002)


def write_steadily(path: str, total: int, region_bytes: int, roll_bytes: int, halfway: Connection) -> None:
    """Append ``total`` records, as fast as it goes, in batches and one by one; half way wait for the word to go on."""
    size, waited = 32, False
    with Writer.open(path, region_bytes=region_bytes, roll_bytes=roll_bytes) as writer:
        number = 0
        while number < total:
            if number >= total // 2 and not waited:
                waited = True
                halfway.recv()
            count = min(20_000, total - number)
            singles = min(500, count)
            for n in range(number, number + singles):
                writer.append(payload(n))
            if count > singles:
                writer.append_many(payload_batch(number + singles, count - singles, size))
            number += count


def read_steadily(path: str, start: Any, total: int, seconds: float, result: Connection) -> None:
    """Read until the last number; send (first number, records, problem)."""
    first, following, count = -1, -1, 0
    try:
        with Reader.open(path, start) as reader:
            result.send("attached")
            deadline = time.monotonic() + seconds
            while following < total and time.monotonic() < deadline:
                batch = reader.read_batch()
                if not len(batch):
                    reader.wait(0.5)
                    continue
                numbers = numbers_of(batch).astype(np.int64)
                if first < 0:
                    first = following = int(numbers[0])
                assert int(numbers[0]) == following, f"{int(numbers[0])} came where {following} was due"
                assert (np.diff(numbers) == 1).all(), "a record is lost or out of order"
                following = int(numbers[-1]) + 1
                count += len(batch)
        result.send((first, count, "" if following >= total else f"nothing after {following} of {total}"))
    except BaseException as exc:
        result.send((first, count, repr(exc)))


def echo(path: str, back: str, count: int) -> None:
    """Send back every record that comes."""
    with Reader.open(path) as reader, Writer.open(back, region_bytes=4096, roll_bytes=100_000) as writer:
        for _ in range(count):
            writer.append(reader.read(timeout=60).payload)
