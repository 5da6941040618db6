"""Promise: readers that join whenever they like get every record from there on, whole, once and in order."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import xchannel_load as load

from penstock.log.xchannel import Reader, Writer, cleanup


@pytest.mark.timeout(7200)
def test_readers_that_join_at_any_moment_lose_nothing(tmp_path: Path, long_run: bool) -> None:
    total = 50_000_000 if long_run else 1_000_000
    seconds = 6000.0 if long_run else 120.0
    path = str(tmp_path / "chan")
    context = load.processes()
    Writer.precreate(path, region_bytes=1 << 20)
    go, word = context.Pipe()
    writer = context.Process(target=load.write_steadily, args=(path, total, 1 << 20, 4 << 20, word), daemon=True)
    readers = []

    def attach(start: str) -> None:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=load.read_steadily, args=(path, start, total, seconds, theirs), daemon=True)
        process.start()
        theirs.close()
        readers.append((start, process, ours))

    attach("earliest")
    began = time.monotonic()
    writer.start()
    with Reader.open(path) as probe:  # the others come when there is something to miss
        assert probe.wait(60)
        attach("earliest")
        while probe.file_sequence < 2:
            if not len(probe.read_batch()):
                assert probe.wait(60)
    attach("latest")
    for _, _, ours in readers:
        assert ours.poll(60)
        assert ours.recv() == "attached"
    go.send("on")
    results = []
    for start, process, ours in readers:
        assert ours.poll(seconds + 60), "a reader hangs"
        results.append((start, *ours.recv()))
        process.join(60)
    writer.join(60)
    assert writer.exitcode == 0
    took = time.monotonic() - began
    for start, first, count, problem in results:
        assert problem == ""
        assert count == total - first
        assert first == 0 if start == "earliest" else 0 < first <= total // 2 + 20_000
    cleanup(path)  # gigabytes in the long form
    print(f"{total} records to three readers in {took:.1f} s, {total / took:,.0f}/s")


@pytest.mark.timeout(7200)
def test_two_processes_bounce_values_in_order(tmp_path: Path, long_run: bool) -> None:  # facts 6.1, 12
    count = 100_000 if long_run else 2000
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    Writer.precreate(there, region_bytes=4096)
    Writer.precreate(back, region_bytes=4096)
    process = load.processes().Process(target=load.echo, args=(there, back, count), daemon=True)
    process.start()
    with Writer.open(there, roll_bytes=100_000) as writer, Reader.open(back) as reader:
        for number in range(count):
            writer.append(number.to_bytes(8, "little"))
            assert int.from_bytes(reader.read(timeout=60).payload, "little") == number
        assert reader.try_read() is None
    process.join(60)
    assert process.exitcode == 0
