"""Promise: a waiter looks often at first, seldom later, and keeps to its time."""

from __future__ import annotations

import itertools
import time

from penstock.disk import Backoff


def test_the_delays_double_up_to_the_longest() -> None:
    backoff = Backoff()
    delays = [backoff.delay() for _ in range(12)]
    assert delays[0] == 50e-6
    assert all(b == min(2 * a, 10e-3) for a, b in itertools.pairwise(delays))
    assert delays[-1] == 10e-3
    assert backoff.delay(remaining=0.001) == 0.001
    assert backoff.delay(remaining=-1) == 0
    backoff.reset()
    assert backoff.delay() == 50e-6


def test_wait_ends_when_it_is_ready_or_out_of_time() -> None:
    looks = iter([False] * 5 + [True])
    assert Backoff().wait(lambda: next(looks))
    began = time.monotonic()
    assert Backoff().wait(lambda: False, timeout=0.02) is False
    assert time.monotonic() - began >= 0.02
    assert Backoff().wait(lambda: True, timeout=0) is True
