"""Replace files by new bytes so that a crash leaves either the old file or the new one, whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from io import UnsupportedOperation
from typing import NamedTuple

from penstock import kernel
from penstock.disk.face import Disk, File
from penstock.disk.posix import PosixDisk, folder_of

__all__ = ["Replacement", "save_atomically", "save_many_atomically"]


class Replacement(NamedTuple):
    """New bytes for the file at ``path``; ``temporary`` is the name they are first written under.

    With a ``spare`` the file that is replaced is not freed but kept under that name, and next time the new bytes may
    go there, which spares the file system an allocation and a release.  ``reuse`` says so.  Who sets it promises that
    the last replacement of ``path`` was its own and came back without an error: only then is the spare surely not what
    a power cut would bring back as ``path``.

    >>> Replacement("settings", b"{}", "settings.tmp").spare
    ''
    """

    path: str
    data: bytes
    temporary: str
    spare: str = ""
    reuse: bool = False


def save_atomically(disk: Disk, path: str, data: bytes, *, temporary: str | None = None) -> None:
    """Write a temporary file beside ``path``, fsync, rename over ``path``, fsync the folder.

    When it returns the new bytes survive a power cut.  When it raises, ``path`` is as it was, unless
    only the last fsync failed: then it is new but may not survive.  ``temporary`` names the file to
    use where a format fixes it; a leftover of that name is replaced.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> save_atomically(disk, "settings", b"{}")
    >>> disk.list("."), disk.open("settings").read_at(0, 9)
    (['settings'], b'{}')
    """
    (error,) = save_many_atomically(disk, [Replacement(path, data, temporary or path + ".tmp")])
    if error is not None:
        raise error


def save_many_atomically(disk: Disk, saves: Sequence[Replacement]) -> list[OSError | None]:
    """Replace many files, each as ``save_atomically`` does; return what each failed with, or None.

    On a real disk they go side by side, each in its own order (``kernel/saves``).  Elsewhere they go step by step: all
    temporaries are written, then all are synced, then all are renamed, then all folders are synced.  One that fails
    takes no further step and keeps none of the others from theirs.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> save_many_atomically(disk, [Replacement("a", b"1", "a.tmp"), Replacement("no/b", b"2", "no/b.tmp")])
    [None, FileNotFoundError(2, 'No such file or directory')]
    >>> disk.list(".")
    ['a']
    """
    if len(saves) > 1 and isinstance(disk, PosixDisk) and kernel.native:
        return _save_side_by_side(saves, disk.file_mode)
    errors: list[OSError | None] = [None] * len(saves)
    files: dict[int, File] = {}  # those that are not renamed yet

    def write(index: int) -> None:
        files[index] = file = _file_for(disk, saves[index])
        file.write_at(0, saves[index].data)
        if saves[index].reuse:
            file.truncate(len(saves[index].data))

    def rename(index: int) -> None:
        files[index].close()
        _put(disk, files[index].path, saves[index])
        del files[index]

    def give_up(index: int) -> None:
        file = files.pop(index, None)
        if file is not None:
            file.close()
            with contextlib.suppress(OSError):
                disk.remove(file.path)

    steps: tuple[Callable[[int], None], ...] = (
        write,
        lambda index: files[index].sync(),
        rename,
        lambda index: disk.sync_folder(folder_of(saves[index].path)),
    )
    try:
        for step in steps:
            for index, error in enumerate(errors):
                if error is None:
                    try:
                        step(index)
                    except OSError as exc:
                        errors[index] = exc
                        give_up(index)
    except BaseException:
        for index in list(files):
            give_up(index)
        raise
    return errors


def _save_side_by_side(saves: Sequence[Replacement], mode: int) -> list[OSError | None]:
    name = os.fsencode
    given = [
        (name(save.path), name(save.temporary), name(save.spare), name(folder_of(save.path)), save.data, save.reuse)
        for save in saves
    ]
    return [
        OSError(failed, os.strerror(failed), save.path) if failed else None
        for save, failed in zip(saves, kernel.saves.save_many(given, mode), strict=True)
    ]


def _file_for(disk: Disk, save: Replacement) -> File:
    """Return the file that the new bytes go to: the spare, or a new one."""
    if save.reuse:
        with contextlib.suppress(FileNotFoundError):
            return disk.modify(save.spare)
    try:
        return disk.create(save.temporary)
    except FileExistsError:
        disk.remove(save.temporary)
        return disk.create(save.temporary)


def _put(disk: Disk, written: str, save: Replacement) -> None:
    """Rename the new file to where it belongs; with a spare the old one takes that name."""
    if save.spare:
        try:
            disk.exchange(written, save.path)
        except (FileNotFoundError, UnsupportedOperation):
            pass  # there is none yet, or the file system cannot: as without a spare
        else:
            if written != save.spare:
                with contextlib.suppress(OSError):
                    disk.rename(written, save.spare)
            return
    disk.rename(written, save.path)
