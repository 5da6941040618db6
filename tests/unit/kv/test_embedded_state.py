"""Promise: the state of a bucket is the fold of its updates, whether they came one by one or together."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from penstock.batch import UpdateBatch
from penstock.clock import SYSTEM_CLOCK
from penstock.disk import MemoryDisk
from penstock.kv.embedded.reckon import Reckoner
from penstock.kv.embedded.state import LATE, BucketState, arrange
from penstock.store import AppendLogStore
from penstock.types import KvUpdate, Op, VersionToken, WatchCursor

KEYS = [f"k{n}" for n in range(LATE + 20)]
UPDATES = st.lists(st.tuples(st.sampled_from(KEYS), st.one_of(st.none(), st.binary(max_size=5))), max_size=3 * LATE)


def folder() -> MemoryDisk:
    disk = MemoryDisk()
    disk.make_folder("b")
    return disk


@settings(max_examples=50, deadline=None)
@given(UPDATES, st.sets(st.integers(0, 3 * LATE)), st.sets(st.integers(0, 3 * LATE)))
def test_the_state_is_the_fold_of_its_updates_however_they_came(
    wanted: list[tuple[str, bytes | None]], looks: set[int], columns: set[int]
) -> None:
    disk, plain = folder(), AppendLogStore.open("plain", disk=MemoryDisk())
    state = BucketState(disk, "b", Reckoner(SYSTEM_CLOCK, disk))
    for number, (key, value) in enumerate(wanted):
        op = Op.DELETE if value is None else Op.PUT
        update = KvUpdate(op, key, value or b"", VersionToken.of(number + 1))
        plain.apply([update], WatchCursor.of(number + 1))
        state.apply(UpdateBatch.of([update]) if number in columns else [update], number + 1, len(key) + 60)
        assert state.entry(key, 0) == plain.get(key)
        assert state.most_live_bytes >= plain.live_bytes
        if number in looks:
            assert (state.count, state.live_bytes) == (plain.count(), plain.live_bytes)
    assert state.revision == len(wanted)
    assert [state.entry(key, 0) for key in KEYS] == plain.multi_get(KEYS)
    found = {update.key: update.value for update in arrange(*state.snapshot("", 0), hidden=True)}
    assert found == {entry.key: entry.value for entry in plain.range()}
    assert state.digest() == plain.digest()
    state.save()
    again = BucketState(disk, "b", Reckoner(SYSTEM_CLOCK, disk))
    assert (again.revision, again.digest()) == (len(wanted), plain.digest())


def test_updates_that_came_one_by_one_wait_and_are_folded_together() -> None:
    disk = folder()
    state = BucketState(disk, "b", Reckoner(SYSTEM_CLOCK, disk))
    for number in range(1, LATE + 1):
        state.apply([KvUpdate.put(f"k{number}", b"v", number)], number, 60)
    assert state._store.count() == 0
    state.apply([KvUpdate.put("one more", b"v", LATE + 1)], LATE + 1, 60)
    assert state._store.count() == LATE + 1
    assert state._store.cursor() == WatchCursor.of(LATE + 1)


def test_saving_covers_what_waits() -> None:
    disk = folder()
    state = BucketState(disk, "b", Reckoner(SYSTEM_CLOCK, disk))
    state.apply([KvUpdate.put("a", b"1", 7)], 7, 60)
    state.save()
    again = BucketState(disk, "b", Reckoner(SYSTEM_CLOCK, disk))
    entry = again.entry("a", 0)
    assert entry is not None
    assert (again.revision, entry.value) == (7, b"1")
