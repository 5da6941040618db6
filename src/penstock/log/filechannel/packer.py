"""Compressing sealed segments in the background.

One worker a channel.  A segment goes through these steps, and a crash between any two loses nothing:

    segment.N.z.ing written and synced → read back and compared → renamed to segment.N.z
        → folder synced → segment.N removed

The two newest segments stay plain: a receiver that keeps up reads the newest sealed one, and often it is collected
before it would be worth compressing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np

from penstock.disk import Disk, ReadFile, start_thread
from penstock.errors import CorruptionError, PenstockError, UnsupportedError
from penstock.log.filechannel.compress import PACK_BYTES, Unpacker, pack
from penstock.log.filechannel.format import HEADER_BYTES, Header, Method, segment_path
from penstock.log.filechannel.recover import set_aside, walk_to_end
from penstock.log.filechannel.retain import Retention
from penstock.log.filechannel.segments import Folder

__all__ = ["Packer"]

logger = logging.getLogger(__name__)
STAYING_PLAIN: Final = 2


class Packer:
    """Compresses what is sealed.  ``kick`` wakes the worker, ``run`` does the same work on the caller's thread."""

    def __init__(self, disk: Disk, folder: Folder, method: Method, retention: Retention) -> None:
        self._disk, self._folder, self._method, self._retention = disk, folder, method, retention
        self._wanted, self._stopping = threading.Event(), threading.Event()
        self._busy = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failed: set[int] = set()

    def kick(self) -> None:
        """Have a look at what there is to do, soon."""
        self._wanted.set()
        if self._thread is None and not self._stopping.is_set():
            self._thread = start_thread(self._work, "penstock-pack")  # or the next kick tries again: plain is as good

    def run(self, *, again: bool = False) -> int:
        """Compress all that may be compressed, ``again`` also what failed before; return how many segments."""
        done = 0
        with self._busy:
            if again:
                self._failed.clear()
            for index, files in self._folder.files().items():
                if self._stopping.is_set():
                    break
                if index > self._retention.newest() - STAYING_PLAIN or not files.plain or index in self._failed:
                    continue
                try:
                    done += self._pack(index, beside=files.packed)
                except UnsupportedError as exc:
                    logger.warning("%s; sealed segments stay plain", exc)
                    self._stopping.set()
                except (OSError, PenstockError) as exc:  # it stays plain, and that is as good
                    logger.warning("segment %d of %s stays plain: %s", index, self._folder.path, exc)
                    self._failed.add(index)
        return done

    def close(self) -> None:
        """Give up what is under way and wait for the worker."""
        self._stopping.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def forked(self) -> None:
        """Leave the worker to the parent."""
        self._thread = None
        self._stopping.set()

    def _work(self) -> None:
        while not self._stopping.is_set():
            self._wanted.wait()
            self._wanted.clear()
            try:
                self.run()
            except OSError as exc:
                logger.warning("%s: nothing is compressed: %s", self._folder.path, exc)

    def _pack(self, index: int, *, beside: bool) -> bool:
        plain, packed = (segment_path(self._folder.path, index, suffix) for suffix in ("", ".z"))
        try:
            source = self._disk.open(plain)
        except FileNotFoundError:
            return False  # collected
        with source:
            header = self._whole(source, index)
            if beside:  # a crash came between the rename and the removal, or the .z is somebody's accident
                try:
                    self._compare(packed, source)
                except CorruptionError as exc:
                    logger.warning("%s; set aside, its plain file is there", exc)
                    set_aside(self._disk, self._folder.path, f"segment.{index}.z")
                else:
                    return self._swap(index, None, packed, plain)
            temporary = packed + ".ing"
            try:
                self._write(source, header, temporary)
                if self._stopping.is_set():
                    return False
                self._compare(temporary, source)
                return self._swap(index, temporary, packed, plain)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    self._disk.remove(temporary)

    def _whole(self, source: ReadFile, index: int) -> Header:
        """Return the header the .z will have; CorruptionError for a segment that is not what its neighbours say."""
        header = Header.decode(source.path, source.read_at(0, HEADER_BYTES), packed=False)
        size = source.stat().size
        end, reason = walk_to_end(source, header.begin, size, None)
        following = self._folder.begin(index + 1)
        if reason or end != following:
            byte = HEADER_BYTES + end - header.begin
            raise CorruptionError(source.path, byte, reason or f"it ends at {end}, the next begins at {following}")
        return Header(index, header.begin, end, self._method)

    def _write(self, source: ReadFile, header: Header, temporary: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(temporary)
        with self._disk.create(temporary) as target:
            rest = source.read_at(0, HEADER_BYTES)[21:]
            target.write_at(0, header.encode(rest))
            at = HEADER_BYTES
            for piece in pack(_pieces(source), self._method):
                if self._stopping.is_set():
                    return
                target.write_at(at, piece)
                at += len(piece)
            target.sync()

    def _compare(self, packed: str, source: ReadFile) -> None:
        """Read a compressed file back: every byte must be that of the plain one."""
        with self._disk.open(packed) as file:
            header = Header.decode(packed, file.read_at(0, HEADER_BYTES), packed=True)
            unpacker, at = Unpacker(file, header), HEADER_BYTES
            while piece := unpacker.read(PACK_BYTES):
                plain = source.read_at(at, len(piece))
                if not np.array_equal(np.frombuffer(piece, np.uint8), np.frombuffer(plain, np.uint8)):
                    raise CorruptionError(packed, HEADER_BYTES, f"it differs from {source.path} near byte {at}")
                at += len(piece)
            unpacker.finish()
            if at != source.stat().size:
                raise CorruptionError(packed, 12, f"it holds {at} of the {source.stat().size} bytes of {source.path}")

    def _swap(self, index: int, temporary: str | None, packed: str, plain: str) -> bool:
        with self._retention.mutex:
            if self._disk.stat(plain) is None:
                return False  # collected meanwhile: it must not come back
            if temporary is not None:
                self._disk.rename(temporary, packed)
            self._disk.sync_folder(self._folder.path)
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(plain)
            self._retention.packed(index)
        return True


def _pieces(source: ReadFile) -> Iterator[bytes]:
    at = HEADER_BYTES
    while piece := source.read_at(at, PACK_BYTES):
        yield piece
        at += len(piece)
