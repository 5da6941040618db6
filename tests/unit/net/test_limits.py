"""Promises of limits: counted exactly, forgotten when nothing is left to count."""

from __future__ import annotations

import pytest

from penstock.errors import OptionsError
from penstock.net import limits
from penstock.net.limits import Admission, ConnectionLimits, TokenBucket
from penstock.testing.clock import FakeClock


def test_a_bucket_never_lets_more_through_than_its_rate_and_burst() -> None:
    clock = FakeClock()
    bucket = TokenBucket(10.0, 5.0, clock)
    taken = 0
    for _ in range(1000):
        taken += bucket.try_take()
        clock.pass_(0.01)
    assert 5 + 99 <= taken <= 5 + 100


def test_a_bucket_that_is_overdrawn_says_how_long_to_wait() -> None:
    clock = FakeClock()
    bucket = TokenBucket(100.0, 100.0, clock)
    assert bucket.take(100) == 0.0
    wait = bucket.take(50)
    assert wait == pytest.approx(0.5)
    clock.pass_(wait)
    assert bucket.take(0) == 0.0
    assert not bucket.full
    clock.pass_(1.0)
    assert bucket.full


def test_the_total_and_an_address_are_limited_and_let_in_again() -> None:
    door = Admission(ConnectionLimits(max_connections=3, max_per_address=2))
    assert [door.enter("10.0.0.1") is None for _ in range(3)] == [True, True, False]
    assert door.enter("10.0.0.2") is None
    assert "3 connections are open" in str(door.enter("10.0.0.3"))
    door.leave("10.0.0.1")
    assert door.enter("10.0.0.3") is None
    assert door.refused == 2


def test_an_ipv6_customer_is_one_address() -> None:
    door = Admission(ConnectionLimits(max_per_address=1))
    assert door.enter("2001:db8:1:2::1") is None
    assert "2001:db8:1:2::/64" in str(door.enter("2001:db8:1:2:ffff::9"))
    assert door.enter("2001:db8:1:3::1") is None


def test_connect_rates_are_per_address_and_in_all() -> None:
    clock = FakeClock()
    door = Admission(ConnectionLimits(connects_per_second=3, connects_per_second_per_address=2), clock)
    assert [door.enter("a") is None for _ in range(3)] == [True, True, False]
    assert [door.enter("b") is None for _ in range(2)] == [True, False]
    clock.pass_(1.0)
    assert door.enter("b") is None


def test_a_flood_from_many_addresses_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEPT_ADDRESSES", 100)
    clock = FakeClock()
    door = Admission(ConnectionLimits(connects_per_second_per_address=1), clock)
    for number in range(10_000):
        door.enter(f"10.{number >> 8}.{number & 255}.1")
    assert len(door._buckets) <= 100


@pytest.mark.parametrize("field", ["max_connections", "max_per_address", "connects_per_second"])
def test_a_limit_that_lets_nobody_in_is_refused(field: str) -> None:
    with pytest.raises(OptionsError, match=field):
        ConnectionLimits(**{field: 0})
