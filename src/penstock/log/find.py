"""Every log below a folder."""

from __future__ import annotations

import importlib
import os
from typing import Final

import msgspec

from penstock.disk import ReadDisk, read_disk_for
from penstock.errors import OptionsError
from penstock.log.detect import FORMATS, detect

__all__ = ["Found", "find_logs"]

DEEPEST: Final = 64
MOST_FOLDERS: Final = 1_000_000


class Found(msgspec.Struct, frozen=True, order=True):
    """A log: its name below the folder that was searched, its path and its format.

    >>> Found("site/ticks", "data/site/ticks", "xchannel").name
    'site/ticks'
    """

    name: str
    path: str
    format: str


def find_logs(path: str | os.PathLike[str], *, format: str | None = None, disk: ReadDisk | None = None) -> list[Found]:
    """Return the log at ``path``, named by its last part, or every log in the folder ``path`` and below, by name.

    Names that begin with a dot are passed over, and so is what belongs to a log that was found.  A folder that links
    lead to more than once is searched once, under the first of its names.

    >>> import tempfile
    >>> from penstock.log.xchannel import Writer
    >>> folder = tempfile.TemporaryDirectory()
    >>> for name in ("ticks", "orders"):
    ...     Writer.precreate(f"{folder.name}/{name}")
    >>> [log.name for log in find_logs(folder.name)]
    ['orders', 'ticks']
    >>> folder.cleanup()
    """
    disk = disk or read_disk_for(path)
    path = os.fspath(path).rstrip("/") or "/"
    formats = (format,) if format else tuple(FORMATS)
    for name in formats:
        if name not in FORMATS:
            raise OptionsError(f"format {name!r}: must be one of {', '.join(FORMATS)}")
    stat = disk.stat(path)
    if stat is None or not stat.is_folder:
        return [Found(os.path.basename(path), path, format or detect(path, disk))]
    found: list[Found] = []
    own = _folder_format(disk, path, formats)
    if own is not None:
        return [Found(os.path.basename(path), path, own)]
    _Search(disk, formats, found).below(path, "", 0)
    return sorted(found)


class _Search:
    """One search; every folder is looked at once, whatever links say."""

    def __init__(self, disk: ReadDisk, formats: tuple[str, ...], found: list[Found]) -> None:
        self._disk, self._formats, self._found = disk, formats, found
        self._seen: set[tuple[int, int]] = set()

    def below(self, folder: str, prefix: str, depth: int) -> None:
        """Find the logs in a folder and below it."""
        if depth > DEEPEST:
            raise OptionsError(f"{folder}: more than {DEEPEST} folders deep; is there a link that leads back up?")
        for known in self._formats:
            logs_in = getattr(importlib.import_module(FORMATS[known]), "logs_in", None)
            names = [name for name in (logs_in(self._disk, folder) if logs_in else ()) if not name.startswith(".")]
            self._found += [Found(prefix + name, os.path.join(folder, name), known) for name in names]
        for name in self._disk.list(folder):
            path = os.path.join(folder, name)
            stat = self._disk.stat(path)
            if name.startswith(".") or ".penstock-" in name or stat is None or not stat.is_folder:
                continue
            if stat.identity in self._seen:
                continue
            try:
                own = _folder_format(self._disk, path, self._formats)
                if own is not None:
                    self._found.append(Found(prefix + name, path, own))
                    continue
                self._seen.add(stat.identity)
                if len(self._seen) > MOST_FOLDERS:
                    raise OptionsError(
                        f"{folder}: more than {MOST_FOLDERS} folders: name the logs, or a folder of fewer"
                    )
                self.below(path, f"{prefix}{name}/", depth + 1)
            except FileNotFoundError:
                continue  # removed since it was listed


def _folder_format(disk: ReadDisk, path: str, formats: tuple[str, ...]) -> str | None:
    for known in formats:
        if importlib.import_module(FORMATS[known]).recognise(disk, path):
            return known
    return None
