"""Promise: a handle ends with a fork and does not travel by pickle."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

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


SCRIPT = """
import os
from penstock.disk.handle import Handle

class Broken(Handle):
    def forked(self):
        raise OSError("cannot let go")

class Whole(Handle):
    gone = False
    def forked(self):
        self.gone = True

handles = [kind() for _ in range(8) for kind in (Broken, Whole)]
child = os.fork()
if not child:
    os._exit(0 if all(handle.gone for handle in handles if isinstance(handle, Whole)) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_handle_that_fails_in_the_child_of_a_fork_keeps_no_other_open() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "0\n"
