"""A new file of a channel, on its way to its name.

A draft is made as ``<base>.penstock-new``, which nobody takes for a file of the channel: not our readers, and not
xchannel 2.0.0.  It gets its name when it is complete, in one step, and never over something that has it.  A writer that
dies before that leaves its draft behind, and the next one removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os

from penstock.disk import Disk, File
from penstock.disk.posix import folder_of
from penstock.kernel import Mapping
from penstock.log.xchannel.files import sidecar_prefix, window_bytes
from penstock.log.xchannel.format import ChannelHeader, file_path
from penstock.log.xchannel.options import WriterOptions

__all__ = ["Draft", "remove_draft"]


class Draft:
    """The file that will be number ``sequence``; its writer has one at a time."""

    def __init__(self, disk: Disk, base: str, sequence: int, region_bytes: int, options: WriterOptions) -> None:
        self.path, self.region_bytes = _draft_path(base), region_bytes
        self._disk, self._target = disk, file_path(base, sequence)
        self._header = ChannelHeader.fresh(sequence, region_bytes, options.max_message_bytes)
        self._durable = options.sync != "none"
        remove_draft(disk, base)
        self.file: File = disk.create(self.path)
        try:
            self.window: Mapping = self.file.map(0, window_bytes(region_bytes), writable=True)
        except BaseException:
            self.drop()
            raise

    def finish(self, *, has_room: bool) -> None:
        """Complete the file and give it its name; if that fails nothing is left of it."""
        try:
            if not has_room:
                self.file.allocate(0, self.region_bytes)
            self.file.write_at(0, self._header.encode())
            if self._durable:
                self.file.sync()
            self._name()
        except BaseException:
            self.drop()
            raise
        self.file.close()
        if self._durable:
            self._disk.sync_folder(folder_of(self._target))

    def drop(self) -> None:
        """Remove the draft."""
        self.file.close()
        with contextlib.suppress(OSError):
            self._disk.remove(self.path)

    def _name(self) -> None:
        try:
            self._disk.link(self.path, self._target)
        except OSError as exc:
            if exc.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            if self._disk.stat(self._target) is not None:  # a file system without hard links
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._target) from None
            self._disk.rename(self.path, self._target)
        else:
            self._disk.remove(self.path)


def remove_draft(disk: Disk, base: str) -> None:
    """Remove what a writer that died has left of a file it was making; only the holder of the lock may."""
    with contextlib.suppress(FileNotFoundError):
        disk.remove(_draft_path(base))


def _draft_path(base: str) -> str:
    return sidecar_prefix(base) + "new"
