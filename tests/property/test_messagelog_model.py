"""Promise: whatever is done to a message log, it reads as the plain list of entries it stands for."""

from __future__ import annotations

from hypothesis import example, given, settings, strategies as st

from penstock.disk import MemoryDisk
from penstock.log.messagelog import MessageLog, MessageLogOptions, MessageLogReader

SIZES = st.sampled_from([0, 1, 30, 200, 900, 5000])
STEP = st.one_of(
    st.tuples(st.just("append"), SIZES, st.integers(0, 3)),
    st.tuples(st.just("many"), st.integers(0, 40), SIZES),
    st.tuples(st.just("read"), st.integers(0, 300), st.integers(1, 50)),
    st.tuples(st.just("follow"), st.integers(1, 9), st.just(0)),
    st.tuples(st.just("reopen"), st.just(0), st.just(0)),
    st.tuples(st.just("drop"), st.integers(0, 200), st.just(0)),
    st.tuples(st.just("delete"), st.just(0), st.just(0)),
)


@example([("append", 900, 0), ("drop", 2, 0)], 300)
@example([("append", 900, 0), ("drop", 2, 0), ("reopen", 0, 0)], 300)
@given(st.lists(STEP, max_size=25), st.sampled_from([300, 3000, 30_000, 1 << 20]))
@settings(deadline=None, max_examples=100)
def test_a_log_reads_as_the_list_it_stands_for(steps: list[tuple[str, int, int]], segment_bytes: int) -> None:
    disk, options = MemoryDisk(), MessageLogOptions(sync="none", segment_bytes=segment_bytes)
    log, reader = MessageLog.open("log", options, disk=disk), MessageLogReader("log", disk)
    model: dict[int, bytes] = {}
    newest, followed = 0, 0
    for action, one, two in steps:
        if action == "append":
            newest = log.append(b"a" * one, seq=log.next_position + two)
            model[newest] = b"a" * one
        elif action == "many":
            numbers = log.append_many([b"%d" % n + b"m" * two for n in range(one)]).tolist()
            model |= {seq: b"%d" % n + b"m" * two for n, seq in enumerate(numbers)}
            newest = max([newest, *numbers])
        elif action == "read":
            position = max(one, reader.first_position)
            batch = reader.read(position, two)
            expected = [seq for seq in sorted(model) if seq >= position]
            assert batch.positions.tolist() == expected[: len(batch)]
            assert len(batch) >= min(1, len(expected))
            assert batch.to_payloads() == [model[seq] for seq in expected[: len(batch)]]
        elif action == "follow":
            position = max(followed + 1, reader.first_position)
            batch = reader.read(position, one)
            expected = [seq for seq in sorted(model) if seq >= position]
            assert batch.positions.tolist() == expected[: len(batch)]
            assert len(batch) >= min(1, len(expected))
            followed = batch.next_position - 1
        elif action == "reopen":
            log.close()
            log = MessageLog.open("log", options, disk=disk)
            assert log.repairs == []
        elif action == "drop":
            log.drop_before(one)
            kept = log.first_seq
            assert all(seq < one for seq in model if seq < kept)  # nothing else went
            model = {seq: payload for seq, payload in model.items() if seq >= kept}
        else:
            log.delete()
            model = {}
        assert log.next_position > newest
    assert [(entry.seq, entry.payload) for entry in reader.entries()] == sorted(model.items())
    assert [p for p in reader.verify() if "gap" not in p.reason] == []
    log.close()
    reader.close()
