"""The format of a data directory: one number, so that a release refuses what it would not understand."""

from __future__ import annotations

import os
from typing import Final

import msgspec

from penstock.disk import disk_for, save_atomically
from penstock.disk.plain import read_whole
from penstock.errors import CorruptionError, OptionsError, UnsupportedError

__all__ = ["FORMAT", "check_version", "require_node"]

FORMAT: Final = 1
"""Raised when an older release could not read what this one writes; docs/howto/operate.md says what to do then."""
FILE: Final = "penstock-format.json"


class _Version(msgspec.Struct, forbid_unknown_fields=False):
    format: int


def require_node(data: str) -> None:
    """Refuse a folder that no node has made, and one of a later release.

    >>> require_node("/nowhere")
    Traceback (most recent call last):
    penstock.errors.OptionsError: /nowhere: there is no such data directory
    """
    disk = disk_for(data)
    found = disk.stat(data)  # which raises where it may not look: os.path would say that nothing is there
    if found is None or not found.is_folder:
        raise OptionsError(f"{data}: there is no such data directory")
    if disk.stat(os.path.join(data, FILE)) is None:
        raise OptionsError(f"{data}: this is not the data directory of a node")
    check_version(data, note=False)


def check_version(data: str, *, note: bool = True) -> int:
    """Return the format of a data directory, noted if it is new; UnsupportedError if it is of a later release.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     check_version(folder), check_version(folder)
    (1, 1)
    """
    path, disk = os.path.join(data, FILE), disk_for(data)
    found = disk.stat(path)
    if found is None and not note:
        return FORMAT
    if found is None:
        save_atomically(disk, path, msgspec.json.encode(_Version(FORMAT)) + b"\n")
        return FORMAT
    text = read_whole(disk, path)
    try:
        version = msgspec.json.decode(text, type=_Version).format
    except msgspec.MsgspecError as exc:
        raise CorruptionError(path, 0, f"not the format of a data directory: {exc}") from None
    if version > FORMAT:
        raise UnsupportedError(f"{data}: written by a later release (format {version}); this one reads up to {FORMAT}")
    return version
