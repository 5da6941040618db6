"""Small instances of everything that is kept on disk, and every way to damage a file of them.

A Thing is made once in a folder of its own.  Each damage is done to a copy, and ``look`` and ``own`` say what comes
out: what a reader, and then its owner, make of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import PenstockError

__all__ = ["Answer", "Damage", "Thing", "damages", "files_below"]

ANSWERS = (PenstockError, OSError)
"""What may be raised: an error of ours, or one of the file system, which names its file."""


class Answer(msgspec.Struct):
    """What came out of a damaged thing: records by position, and everything that was said to be wrong."""

    records: dict[Any, bytes]
    said: list[str]


class Thing(msgspec.Struct):
    """Something on disk: how it is made, what reading it gives, and what its owner does when it opens it."""

    name: str
    make: Callable[[Path], dict[Any, bytes]]
    look: Callable[[Path], Answer]
    own: Callable[[Path], list[str]]
    checked: bool = True
    """Whether its format can tell every changed byte: one without checksums cannot."""


class Damage(msgspec.Struct, frozen=True):
    """One way to damage one file."""

    file: str
    how: str
    at: int = 0
    other: str = ""

    def do(self, root: Path) -> None:
        """Do it."""
        path = root / self.file
        match self.how:
            case "flip":
                data = bytearray(path.read_bytes())
                data[self.at] ^= 1 << (self.at % 8)
                path.write_bytes(data)
            case "cut":
                os.truncate(path, self.at)
            case "zero":
                data = bytearray(path.read_bytes())
                data[self.at :] = bytes(len(data) - self.at)
                path.write_bytes(data)
            case "remove":
                path.unlink()
            case "swap":
                one, two = path.read_bytes(), (root / self.other).read_bytes()
                path.write_bytes(two)
                (root / self.other).write_bytes(one)
            case "double":
                shutil.copyfile(path, root / self.other)

    def __str__(self) -> str:
        return f"{self.how} {self.file} {self.other or self.at}"


def files_below(root: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def damages(root: Path, used: Callable[[str, bytes], int], *, every: int) -> Iterator[Damage]:
    """Yield every damage, or one in ``every`` of those that go by byte; ``used``: how many bytes of a file matter."""
    files = files_below(root)
    number = 0
    for file, data in files.items():
        length = used(file, data)
        for how in ("flip", "cut", "zero"):
            for at in range(length):
                number += 1
                if number % every == 0 or (how != "flip" and at == 0):
                    yield Damage(file, how, at)
        yield Damage(file, "remove")
        yield Damage(file, "double", other=_next_name(file))
        for other in files:
            if other > file and _kind(other) == _kind(file):
                yield Damage(file, "swap", other=other)


def _kind(file: str) -> str:
    """Return what a file is: its name without numbers."""
    return "".join(character for character in file if not character.isdigit())


def _next_name(file: str) -> str:
    """Return a name that a file of the same kind could have: the last number in it, and some more."""
    inside = file.rfind("/")
    digits = [place for place, character in enumerate(file) if character.isdigit() and place > inside]
    if not digits:
        return file + ".1"
    end = digits[-1] + 1
    start = end
    while start > 0 and file[start - 1].isdigit():
        start -= 1
    return f"{file[:start]}{int(file[start:end]) + 7:0{end - start}d}{file[end:]}"
