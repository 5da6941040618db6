"""Batches of updates joined into one."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from penstock.batch import UpdateBatch
from penstock.types import KvUpdate

UPDATES = st.builds(KvUpdate.put, st.text(max_size=5), st.binary(max_size=5), st.none() | st.integers(0, (1 << 64) - 1))


@settings(deadline=None)
@given(st.lists(st.lists(UPDATES, max_size=4), max_size=4))
def test_joined_batches_hold_the_same_updates_in_order(parts: list[list[KvUpdate]]) -> None:
    joined = UpdateBatch.concat([UpdateBatch.of(part) for part in parts])
    flat = [update for part in parts for update in part]
    assert list(joined) == flat
    assert joined.revisions().tolist() == [update.version.as_int() for update in flat if update.version.known]
