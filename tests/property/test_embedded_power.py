"""Promise: after a power cut a bucket is as some write left it, and with sync="always" as the last one did."""

from __future__ import annotations

import errno
from contextlib import closing
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from penstock.disk import MemoryDisk
from penstock.errors import CorruptionError
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
@example(
    [[("put", "a", 808), ("put", "a", 5500), ("put", "a", 8948)], [("put", "a", 0)] * 4], "none", 200, -1, 4311, 0.4
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


def bucket_with_a_hole(disk: FaultyDisk, sync: Any) -> None:
    """Write three changes and lose the second of them, as a device that writes pages in its own order may."""
    bucket = Bucket.open("b", StoreConfig(name="b"), EmbeddedOptions(sync=sync), disk=disk)
    for number in range(3):
        bucket.commit([Change("put", f"k{number}", b"%d" % number * 500)])
    bucket.close()
    (name,) = (name for name in disk.list("b/log") if name.endswith(".log"))
    with disk.modify(f"b/log/{name}") as file:
        file.write_at(file.stat().size // 3 + 20, bytes(100))


def test_a_hole_that_a_power_cut_left_ends_a_bucket_there_and_what_lay_behind_is_set_aside() -> None:
    disk = FaultyDisk(MemoryDisk())
    bucket_with_a_hole(disk, "none")
    disk.boots += 1
    with closing(Bucket.open("b", StoreConfig(name="b"), EmbeddedOptions(sync="none"), disk=disk)) as bucket:
        assert [row.key for row in bucket.scan("")[0]] == ["k0"]
        assert bucket.commit([Change("put", "after", b"1")]) == [2]
    assert [name for name in disk.list("b/log") if name.endswith(".bad")]
    with closing(Bucket.open("b", StoreConfig(name="b"), EmbeddedOptions(sync="none"), disk=disk)) as bucket:
        assert [row.key for row in bucket.scan("")[0]] == ["k0", "after"]


@pytest.mark.parametrize(("sync", "boots"), [("none", 0), ("always", 1)])
def test_a_hole_in_what_was_synced_or_written_in_this_boot_is_damage(sync: Any, boots: int) -> None:
    disk = FaultyDisk(MemoryDisk())
    bucket_with_a_hole(disk, sync)
    disk.boots += boots
    before = disk.list("b/log")
    with pytest.raises(CorruptionError, match="changes from revision 2 to 2 are missing"):
        Bucket.open("b", StoreConfig(name="b"), EmbeddedOptions(sync=sync), disk=disk)
    assert disk.list("b/log") == before


def test_who_may_only_read_is_told_of_the_hole() -> None:
    disk = FaultyDisk(MemoryDisk())
    bucket_with_a_hole(disk, "none")
    disk.boots += 1

    def refuse(operation: str, path: str) -> None:
        if operation in ("modify", "create", "rename", "remove", "lock"):
            raise OSError(errno.EROFS, "Read-only file system", path)

    disk.on_call = refuse
    with pytest.raises(CorruptionError, match="are missing from the log"):
        Bucket.open("b", StoreConfig(name="b"), EmbeddedOptions(sync="none"), disk=disk)
