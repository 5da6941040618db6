"""Law: whatever comes, and however often the store refuses, its cursor covers exactly what it holds."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from penstock.batch import UpdateBatch
from penstock.fold.face import BatchConfig
from penstock.fold.queue import FoldQueue
from penstock.types import KvUpdate

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("flush"), st.booleans()),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(STEPS)
def test_the_cursor_covers_exactly_what_the_store_holds(steps: list[tuple[object, ...]]) -> None:
    queue = FoldQueue(BatchConfig(max_updates=3, window_seconds=1.0))
    revision, now = 0, 0.0
    received: list[KvUpdate] = []
    applied: list[KvUpdate] = []
    stored: list[KvUpdate] = []
    cursor = 0
    for step in steps:
        now += 0.1
        if step[0] == "add":
            updates = []
            for n in range(int(str(step[1]))):
                revision += 1
                unknown = bool(step[2]) and n == 0
                updates.append(KvUpdate.put(f"k{revision}", b"v", None if unknown else revision))
            received += updates
            queue.add(UpdateBatch.of(updates), now)
            continue
        fresh = queue.take()
        applied += list(fresh or ())
        batch = queue.to_store()
        if batch is not None and step[1]:
            stored += list(batch)
            cursor = queue.reached or 0
            queue.stored()
        elif batch is not None:
            queue.refused(now)
        assert applied == received  # each one once, in order
        assert stored == received[: len(stored)]  # a prefix: no hole, no double
        known = [update.version.as_int() or 0 for update in stored]
        assert cursor == max(known, default=0)
        assert len(queue) == len(received) - len(stored)
