"""Promise: after a power cut a bucket is as some write left it, and with sync="always" as the last one did."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings, strategies as st

from penstock.disk import MemoryDisk
from penstock.kv import EmbeddedOptions, StoreConfig
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.embedded.plan import Change
from penstock.testing.faulty import FaultyDisk

TURN = st.lists(
    st.tuples(st.sampled_from(["put", "put", "delete"]), st.sampled_from(["a", "b", "c"]), st.integers(0, 9000)),
    min_size=1,
    max_size=4,
)


@given(
    st.lists(TURN, min_size=1, max_size=14),
    st.sampled_from(["none", "always"]),
    st.sampled_from([200, 20_000, 1 << 30]),
    st.sampled_from([80_000, -1]),
    st.integers(0, 1 << 30),
    st.sampled_from([0.0, 0.4, 1.0]),
)
@settings(deadline=None, max_examples=60)
def test_a_bucket_after_a_power_cut_is_as_some_write_left_it(
    turns: list[Any], sync: Any, checkpoint_bytes: int, max_bytes: int, seed: int, keep: float
) -> None:
    disk = FaultyDisk(MemoryDisk())
    config = StoreConfig(name="b", max_bytes=max_bytes, discard="old")
    options = EmbeddedOptions(sync=sync, checkpoint_bytes=checkpoint_bytes)
    bucket = Bucket.open("b", config, options, disk=disk)
    state: dict[str, tuple[bytes, int]] = {}
    states = [dict(state)]
    for turn in turns:
        for what, key, size in turn:
            if what == "put":
                state[key] = (b"%d" % len(states) * (size // 4), len(states))
            else:
                state.pop(key, None)
            states.append(dict(state))
        bucket.commit([Change(what, key, b"%d" % (len(states) - len(turn) + n) * (size // 4) if what == "put" else b"")
                       for n, (what, key, size) in enumerate(turn)])  # fmt: skip
    bucket._log.forked()  # the process is gone with the power
    bucket.forked()

    disk.cut_power(seed=seed, keep=keep)
    again = Bucket.open("b", config, options, disk=disk)
    revision = again.catch_up()
    rows = again.scan("", hidden=True)[0]
    assert {row.key: (row.value, row.version.as_int()) for row in rows} == states[revision]
    assert revision == len(states) - 1 or sync == "none"
    assert again.commit([Change("put", "after", b"1")])[0] > revision  # type: ignore[operator]
    again.close()
