"""When the records of one writer survive a power cut, and the mark that says so to everyone else."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable

from penstock.disk import Disk
from penstock.disk.commit import GROUP, Committer
from penstock.disk.posix import folder_of
from penstock.errors import ReadOnlyError, ReplacedError
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel.format import file_path
from penstock.log.xchannel.options import WriterOptions
from penstock.log.xchannel.tip import Tip

__all__ = ["Durability"]


class Durability:
    """Syncs one channel as its options say, and by hand."""

    def __init__(self, disk: Disk, sidecar: Sidecar, options: WriterOptions, tip: Tip) -> None:
        self._disk, self._sidecar, self._tip = disk, sidecar, tip
        self._always = options.sync == "always"
        self._syncing = threading.Lock()
        self._unsynced = tip.file.sequence  # the oldest file that a sync has yet to reach
        self._marked = False
        self._unsafe: OSError | None = None
        self._committer: Committer | None = None
        if options.sync == "interval":
            self._committer = GROUP.committer(self._sync_now, interval=options.sync_seconds)
        elif self._always:
            self._committer = GROUP.committer(self._sync_now)

    def check(self) -> None:
        """Raise what an earlier sync failed with, unless that was mended: before something is appended."""
        if self._committer is not None:
            self._committer.check()

    def written(self) -> None:
        """Do what the options ask for after records were appended."""
        if self._committer is None:
            return
        if self._always:
            self._committer.wait()
        else:
            self._committer.touch()

    def rolled(self) -> None:
        """Have a file that was ended synced with what comes next."""
        if self._committer is not None:
            self._committer.touch()

    def sync(self) -> int:
        """Return, with the position, when everything appended so far survives a power cut."""
        if self._committer is not None:
            self._tip.check_open()
            return self._committer.wait()
        return self._sync_now()

    def close(self) -> None:
        """Sync once more where syncs were asked for."""
        if self._committer is not None:
            try:
                self._committer.wait()
            finally:
                self._committer.close()
        elif self._marked:
            self._sync_now()

    def forked(self) -> None:
        """Forget the parent's syncs in the child of a fork."""
        self._committer = None

    def _sync_now(self) -> int:
        """Sync every file since the last time, then move the mark, which never moves back.

        After a flush of records that failed nobody knows which pages reached the device, and the next one may succeed
        without them: the mark never moves again, until the channel is opened anew.  What fails before or after that (no
        descriptor left, no room for the mark) has lost nothing, and the next sync tries it again.
        """
        with self._syncing:
            if self._unsafe is not None:
                raise ReadOnlyError(
                    f"{self._tip.path}: an earlier sync failed: {self._unsafe}; mend its cause and reopen"
                )
            return self._sync_files()

    def _sync_files(self) -> int:
        position, sequence, window, used, identity = self._tip.written_to()
        first = self._unsynced
        for older in range(first, sequence):
            with contextlib.suppress(FileNotFoundError):  # retention was faster
                self._sync_file(older)
        if sys.platform != "linux":  # there a flush of the file takes along what was written through a map
            self._flush(lambda: window.sync(0, used))
        try:
            synced = self._sync_file(sequence)
        except FileNotFoundError:
            synced = None
        if synced != identity and self._tip.file.sequence == sequence:
            raise ReplacedError(self._tip.path, "its newest file was moved or removed while its writer had it open")
        if first < sequence or not self._marked:
            self._disk.sync_folder(folder_of(self._tip.path))
        self._sidecar.write_mark(position)
        self._unsynced, self._marked = sequence, True
        return position

    def _sync_file(self, sequence: int) -> tuple[int, int]:
        with self._disk.modify(file_path(self._tip.path, sequence)) as file:
            self._flush(file.sync)
            return file.stat().identity

    def _flush(self, sync: Callable[[], None]) -> None:
        try:
            sync()
        except OSError as exc:
            self._unsafe = exc
            raise
