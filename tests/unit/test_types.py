"""Promise: the small values check themselves and do not change."""

from __future__ import annotations

import pickle

import pytest

from penstock.errors import OptionsError
from penstock.types import KvEntry, KvUpdate, Op, Problem, Record, VersionToken, WatchCursor


def test_a_token_holds_a_revision_or_foreign_bytes() -> None:
    assert VersionToken.of(0).raw == bytes(8)
    assert VersionToken.of(2**64 - 1).as_int() == 2**64 - 1
    assert VersionToken.of(258).raw == b"\0\0\0\0\0\0\1\2"
    assert VersionToken(b"0123456789").as_int() is None
    assert repr(VersionToken(b"\1\2")) == "VersionToken([1, 2])"
    assert repr(VersionToken()) == "VersionToken(unknown)"
    assert repr(VersionToken.of(7)) == "VersionToken(u64: 7)"
    for wrong in (-1, 2**64):
        with pytest.raises(OptionsError, match="does not fit 64 bits"):
            VersionToken.of(wrong)
    with pytest.raises(OptionsError, match="at most 10 bytes, not 11"):
        VersionToken(bytes(11))


def test_an_unknown_version_is_not_version_zero() -> None:
    assert VersionToken() != VersionToken.of(0)
    assert not VersionToken().known
    assert VersionToken.of(0).known
    assert WatchCursor().at_start
    assert not WatchCursor.of(0).at_start


def test_values_are_frozen_hashable_and_picklable() -> None:
    for value in (
        VersionToken.of(3),
        WatchCursor.of(3),
        KvEntry("k", b"v", VersionToken.of(1)),
        KvUpdate.put("k", b"v", 1),
        Problem("f", 1, "r"),
    ):
        assert pickle.loads(pickle.dumps(value)) == value
        assert len({value, pickle.loads(pickle.dumps(value))}) == 1
        with pytest.raises(AttributeError):
            value.raw = b""  # type: ignore[union-attr, misc]


def test_updates_say_what_they_do() -> None:
    assert KvUpdate.put("k", b"v") == KvUpdate(Op.PUT, "k", b"v", VersionToken())
    assert KvUpdate.delete("k", 4) == KvUpdate(Op.DELETE, "k", b"", VersionToken.of(4))
    assert KvUpdate.purge("k", 5).op is Op.PURGE
    assert {op.name: op.value for op in Op} == {"PUT": 0, "DELETE": 1, "PURGE": 2}  # on disk for ever


def test_a_record_keeps_the_bytes_it_points_into() -> None:
    record = Record(0, None, None, memoryview(bytearray(b"alive")))
    assert bytes(record.payload) == b"alive"
    assert record.extra is None
    assert str(Problem("chan.1", 112, "bad")) == "chan.1 at byte 112: bad"
