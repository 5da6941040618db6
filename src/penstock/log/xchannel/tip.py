"""The end of a channel, where its one writer is at work: it moves from region to region and from file to file.

Order of publication and of rolling (docs/formats/xchannel.md):

    record   payload → next header → header → commit byte → message_count → write_position
    region   grow the file → header at the next region's start → Skip committed → counters
    file     new file complete under its name → Roll committed → write_position → old files removed

A crash between any two of these steps leaves a channel that readers read on and the next writer continues.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from penstock import kernel
from penstock.disk import Disk, File, Owned
from penstock.errors import ClosedError, CorruptionError, OptionsError
from penstock.kernel import Mapping
from penstock.log.xchannel.ahead import Ahead
from penstock.log.xchannel.draft import Draft
from penstock.log.xchannel.files import ChannelFile, page_size
from penstock.log.xchannel.format import (
    FIRST_SLOT,
    MAX_FILE_BYTES,
    SLOT_BYTES,
    RecordStop,
    file_path,
    footprint,
    position_of,
)
from penstock.log.xchannel.options import DEFAULT_REGION_BYTES, WriterOptions
from penstock.log.xchannel.recover import complete_roll, find_end, keep_hidden
from penstock.log.xchannel.remove import FileRetention

__all__ = ["Tip"]

_Place = tuple[ChannelFile, int, Mapping, int, Mapping]  # file, offset, window, where that starts, channel header


class Tip:
    """Belongs to one writer.  Whatever takes longer than a record parks the appender and holds ``lock``."""

    def __init__(
        self,
        disk: Disk,
        base: str,
        options: WriterOptions,
        sequences: list[int],
        owned: Owned | None = None,
        note_roll: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Go to the end of the newest of those files; without any, make the first."""
        from penstock.kernel.xchannelwrite import Appender

        self.path, self.options = base, options
        self.lock = threading.RLock()
        self.dead = ""
        self.is_cut = False
        """Whether somebody was told that the file was cut."""
        self._disk, self._owned, self._note_roll = disk, owned or Owned(disk, base), note_roll
        self._head: tuple[ChannelFile, Mapping] | None = None  # the mapped channel header, and whose it is
        self._ahead = Ahead()
        self._draft: Draft | None = None  # the next file, made ready
        self._following: tuple[Mapping, int] | None = None  # the next window of this file, and where that starts
        if not sequences:
            self._create(0, options.region_bytes or DEFAULT_REGION_BYTES)
            sequences = [0]
        self.file, offset = self._continue(sequences[-1], options.region_bytes)
        try:
            if self.file.sequence > 0:
                complete_roll(disk, base, self.file)
            self._retention = FileRetention(disk, base, options.keep_files, sequences)
            self.largest = options.largest_message(self.file.region_bytes)
            self.appender = Appender(self.make_room, self.largest)
            self._attach(self._place(self.file, offset))
        except BaseException:
            self.file.close()
            raise
        self._look_ahead()
        self.appender.resume()

    # --- Moving on

    def make_room(self, length: int) -> None:
        """Move on until a record of that length fits, or say why it never will."""
        with self.lock:
            self.check_open()
            self.check_whole()
            self._check_length(length)
            with self._parked():
                while True:
                    if self.appender.due(length):
                        self._roll()
                    elif self.appender.crosses(length):
                        self._skip()
                    else:
                        return

    def roll(self) -> None:
        """End this file and go on in the next one."""
        with self.lock:
            self.check_open()
            self.check_whole()
            with self._parked():
                self._roll()

    def roll_unless_reserved(self) -> bool:
        """End this file, but not under a record that is being filled in; return whether it was ended."""
        with self.lock:
            self.check_open()
            with self._parked():  # from here on nobody reserves
                if self.appender.pending >= 0:
                    return False
                self._roll()
                return True

    def written_to(self) -> tuple[int, int, Mapping, int, tuple[int, int]]:
        """Return the next position, its file's number, the window, how much of it is used, and which file that is."""
        with self.lock:
            self.check_open()
            self.check_whole()
            used = self.appender.offset - self._window_start
            return self.appender.position, self.file.sequence, self._window, used, self.file.file.stat().identity

    def check_whole(self) -> None:
        """Refuse to go on in a file that was cut while it was mapped: what was written since is nowhere.

        A cut within the last page does not tear the mapping, and is seen by the length of the file alone.
        """
        size = self.file.size
        if size < self._region_end or self._window.torn or (self._head is not None and self._head[1].torn):
            self.is_cut = True
            raise CorruptionError(self.file.path, size, "the file was cut while its writer had it open")

    # --- Open and closed

    def check_open(self) -> None:
        """Raise ClosedError once the writer is closed."""
        if self.dead:
            raise ClosedError(f"{self.path}: {self.dead}")

    def close(self) -> None:
        """Let go of the files; what was made ready and not used goes away."""
        with self.lock:
            self.dead = "the writer is closed"
            self.appender.detach()
            self._ahead.give_back(self.file)
            self._drop_draft()
            self._ahead.close()
            self.file.close()
            self._owned.release()

    def forked(self) -> None:
        """Close in the child of a fork: everything on disk stays the parent's."""
        self.lock = threading.RLock()
        self.dead = "the writer was opened before a fork: open its own channel in the child"
        self._ahead.forked()
        self.appender.detach()
        self.file.close()
        self._owned.release()
        if self._draft is not None:
            self._draft.file.close()
        self._draft = None

    # --- Region by region

    @contextlib.contextmanager
    def _parked(self) -> Iterator[None]:
        """Keep other threads out of the appender while it is moved."""
        self.appender.park()
        try:
            yield
        finally:
            self.appender.resume()

    def _check_length(self, length: int) -> None:
        if length < 0:
            raise OptionsError(f"{self.path}: a record cannot have {length} bytes")
        if length <= self.largest:
            return
        if 0 < self.options.max_message_bytes < length:
            limit = f"max_message_bytes is {self.options.max_message_bytes}"
        else:
            limit = (
                f"regions of {self.file.region_bytes} bytes"
                + (f" in files of {self.options.roll_bytes}" if self.options.roll_bytes else "")
                + f" hold at most {self.largest}"
            )
        raise OptionsError(f"{self.path}: a message of {length} bytes is too large: {limit}")

    def _skip(self) -> None:
        """Go on in the next region of the file."""
        file = self.file
        offset = (self.appender.offset // file.region_bytes + 1) * file.region_bytes
        mapped = self._ahead.take(file, offset)
        if mapped < 0:
            _writable(file).allocate(offset, file.region_bytes)
        same = offset - self._window_start < len(self._window)
        if same:
            window, start = self._window, self._window_start
        elif self._following is not None and self._following[1] == offset:
            window, start = self._following
        else:
            window, start = file.window(offset, writable=True)
        self._following = None
        kernel.xchannelwrite.install_header(window, offset - start)
        place = self._place(file, offset, window)
        self.appender.commit_skip()
        left = self._window
        self._attach(place, mapped)
        if not same:
            self._ahead.tidy(left)
        self._look_ahead()

    def _place(self, file: ChannelFile, offset: int, window: Mapping | None = None) -> _Place:
        """Map what writing at ``offset`` of a file takes: everything about a move that can fail."""
        start = offset // file.window_bytes * file.window_bytes
        if window is None:
            window, start = file.window(offset, writable=True)
        head = self._head[1] if self._head and self._head[0] is file else file.file.map(0, page_size, writable=True)
        return file, offset, window, start, head

    def _attach(self, place: _Place, mapped: int = 0) -> None:
        """Point the appender at a place, where a header lies already and pages are mapped up to ``mapped``."""
        file, offset, window, start, head = place
        self._window, self._window_start, self._head = window, start, (file, head)
        self._region_end = (offset // file.region_bytes + 1) * file.region_bytes
        self._roll_end = self.options.roll_bytes or MAX_FILE_BYTES
        self.appender.attach(
            window, head, offset - start, self._region_end - start, self._roll_end - start,
            max(offset, mapped) - start, start, position_of(file.sequence, start),
        )  # fmt: skip

    def _look_ahead(self) -> None:
        """Have what comes next made ready while this region is filled: another region, or the next file."""
        if self._region_end + footprint(0) + SLOT_BYTES <= self._roll_end:  # there will be a record in it
            if self._ahead.should_prepare(self.file.region_bytes):
                window, start = self._window, self._window_start
                if self._region_end - start >= len(window):
                    with contextlib.suppress(OSError):  # the writer will meet the same when it comes there
                        window, start = self._following = self.file.window(self._region_end, writable=True)
                self._ahead.ask(self.file, window, start, self._region_end)
        elif self._draft is None and self._ahead.should_prepare(self._roll_end):
            with contextlib.suppress(OSError):  # the roll will meet the same, and say so
                self._draft = self._new_draft(self.file.sequence + 1, self.file.region_bytes)
                self._ahead.ask(self._draft, self._draft.window, 0, 0)

    # --- File by file

    def _roll(self) -> None:
        """Go on in the next file.  If that cannot be had, this one stays in use."""
        successor, offset, window, mapped = self._successor()
        try:
            place = self._place(successor, offset, window)
        except BaseException:
            successor.close()
            raise
        ended = self.appender.position
        self._following = None
        self.appender.commit_roll(max(0, time.time_ns()))
        self._note_roll(ended)
        self._ahead.give_back(self.file)
        old, self.file = self.file, successor
        left = self._window
        self._attach(place, mapped)
        self._ahead.tidy(left, old.file, *self._retention.rolled(successor.sequence, ended))
        self._look_ahead()

    def _successor(self) -> tuple[ChannelFile, int, Mapping | None, int]:
        """Return the next file, where to write in it, its window, and up to where that is mapped already."""
        following = self.file.sequence + 1
        path = file_path(self.path, following)
        there = self._disk.stat(path)
        if there is not None and there.is_folder:
            raise OptionsError(f"{path}: a folder has the name of the channel's next file")
        if there is not None and there.size == 0:
            self._disk.remove(path)  # never initialised
            there = None
        if there is None:
            window, mapped = self._create(following, self.file.region_bytes)
            return ChannelFile(self.path, following, self._disk.modify(path)), FIRST_SLOT, window, mapped
        self._drop_draft()
        try:
            return *self._continue(following, self.file.region_bytes), None, 0
        except OptionsError as exc:
            raise CorruptionError(path, 40, str(exc)) from None

    def _create(self, sequence: int, region_bytes: int) -> tuple[Mapping, int]:
        """Give the next file its name, from what was made ready or from nothing; return its window, mapped so far."""
        draft, self._draft = self._draft or self._new_draft(sequence, region_bytes), None
        mapped = self._ahead.take(draft, 0)
        draft.finish(has_room=mapped >= 0)
        self._owned.take(file_path(self.path, sequence))
        return draft.window, max(mapped, 0)

    def _new_draft(self, sequence: int, region_bytes: int) -> Draft:
        return Draft(self._disk, self.path, sequence, region_bytes, self.options)

    def _drop_draft(self) -> None:
        if self._draft is not None:
            self._ahead.take(self._draft, 0)  # nobody works on it any more
            self._draft.drop()
        self._draft = None

    def _continue(self, sequence: int, region_bytes: int | None) -> tuple[ChannelFile, int]:
        """Open a file to write on at its end; return it and the offset of the end."""
        path = file_path(self.path, sequence)
        self._owned.take(path)
        file = ChannelFile(self.path, sequence, self._disk.modify(path))
        if region_bytes is not None and file.region_bytes != region_bytes:
            file.close()
            raise OptionsError(
                f"{path}: its region size is {file.region_bytes}, not {region_bytes}; nothing was changed"
            )
        try:
            offset, stop, count = find_end(file)
            keep_hidden(self._disk, file, offset, stop)
            if stop is RecordStop.ROLLED:  # the file it leads to was lost before anything was in it
                file.close()
                self._create(sequence + 1, file.region_bytes)
                return self._continue(sequence + 1, region_bytes)
            region = offset // file.region_bytes * file.region_bytes
            _writable(file).allocate(region, file.region_bytes)
            head = file.file.map(0, page_size, writable=True)
            window, start = file.window(offset, writable=True)
            kernel.xchannelwrite.install_header(window, offset - start)
            kernel.xchannelwrite.store_counts(head, offset + SLOT_BYTES, count)
        except BaseException:
            file.close()
            raise
        return file, offset


def _writable(file: ChannelFile) -> File:
    return file.file  # type: ignore[return-value]  # opened by modify
