"""Promise: the loop waits for the disk while that is quick, and the longer it is not the more seldom it tries."""

from __future__ import annotations

from penstock.channels.patience import FEWEST, MOST, Patience

QUICK, SLOW = 0.0003, 0.005


def until_allowed(patience: Patience) -> int:
    """Return how many messages go to a thread, where the sync is quick, before the loop may try again."""
    for count in range(10 * MOST):
        if patience.allows():
            return count
        patience.took(QUICK, on_loop=False)
    raise AssertionError("the loop is never tried again")


def test_a_quick_disk_is_waited_for_on_the_loop() -> None:
    patience = Patience(0.002)
    assert until_allowed(patience) == 1  # the first one tells
    for _ in range(100):
        patience.took(QUICK, on_loop=True)
        assert patience.allows()


def test_a_slow_disk_is_never_waited_for_on_the_loop() -> None:
    patience = Patience(0.002)
    for _ in range(100):
        assert not patience.allows()
        patience.took(SLOW, on_loop=False)


def test_the_longer_it_goes_wrong_the_more_seldom_it_is_tried() -> None:
    patience = Patience(0.002)
    patience.took(QUICK, on_loop=False)
    pauses = []
    for _ in range(9):
        patience.took(SLOW, on_loop=True)
        pauses.append(until_allowed(patience))
    assert pauses == [64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096]
    assert (pauses[0], pauses[-1]) == (FEWEST, MOST)


def test_quick_ones_make_up_for_a_slow_one_in_time() -> None:
    patience = Patience(0.002)
    patience.took(QUICK, on_loop=False)
    for _ in range(3):
        patience.took(SLOW, on_loop=True)
        until_allowed(patience)
    for _ in range(1000):
        patience.took(QUICK, on_loop=True)
    patience.took(SLOW, on_loop=True)
    assert until_allowed(patience) == FEWEST


def test_a_limit_of_nothing_forbids_it() -> None:
    patience = Patience(0)
    for seconds in (QUICK, SLOW, QUICK):
        patience.took(seconds, on_loop=False)
        assert not patience.allows()
