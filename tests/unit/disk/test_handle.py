"""Promise: a handle ends with a fork and does not travel by pickle."""

from __future__ import annotations

import copy
import os
import pickle

import pytest

from penstock.disk import Handle


class Noting(Handle):
    def __init__(self) -> None:
        super().__init__()
        self.ended = False

    def forked(self) -> None:
        self.ended = True


@pytest.mark.filterwarnings("ignore:This process")
def test_it_is_told_in_the_child_only() -> None:
    handle = Noting()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - the child reports through the pipe
        os.write(writing, b"1" if handle.ended else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1) == b"1"
    assert not handle.ended
    os.close(reading)
    os.close(writing)


def test_it_refuses_to_travel() -> None:
    for travel in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="a Noting cannot be pickled: open it again"):
            travel(Noting())
