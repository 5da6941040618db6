"""Cutting a channel into spans that are read in parallel, looking at headers only.

A position counts frame bytes, so the headers of the segments say how long each of them is, compressed or not.  A plain
segment longer than a span is cut at frames, which are found by hopping over their lengths; a compressed one cannot be
entered in the middle without unpacking what is before, so it stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock import kernel
from penstock.disk import ReadFile
from penstock.disk.sparse import first_hole
from penstock.errors import CorruptionError
from penstock.log.filechannel.format import FRAME_HEAD, HEADER_BYTES, Header
from penstock.log.filechannel.segments import Folder

__all__ = ["cut"]

FINEST_BYTES: Final = 64 << 10
"""A piece of a segment is not worth cutting below this."""
WINDOW_BYTES: Final = 4 << 20


def cut(folder: Folder, start: int, end: int, span_bytes: int) -> list[tuple[int, int]]:
    """Return where spans of about ``span_bytes`` between two positions begin, and how long each is."""
    spans: list[tuple[int, int]] = []
    begin = start
    for index, low, high in _parts(folder, start, end):
        if low > begin and high - begin > span_bytes * 5 // 4:  # small segments are grouped
            spans.append((begin, low - begin))
            begin = low
        if high - begin > span_bytes * 3 // 2:
            for at in _frames(folder, index, low, high, max(span_bytes, FINEST_BYTES)):
                spans.append((begin, at - begin))
                begin = at
    return [*spans, (begin, end - begin)] if begin < end else spans


def _parts(folder: Folder, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index, low, high) of the segments between two positions; the last one counts as far as ``end``."""
    indexes = list(folder.files())
    known = [(index, begin) for index in indexes if (begin := folder.begin(index)) is not None]
    bounds = [begin for _, begin in known[1:]] + [end]
    for (index, begin), bound in zip(known, bounds, strict=True):
        low, high = max(begin, start), min(bound, end)
        if low < high:
            yield index, low, high


def _frames(folder: Folder, index: int, low: int, high: int, span_bytes: int) -> Iterator[int]:
    """Yield where frames begin that are about ``span_bytes`` apart, none for a compressed segment.

    Nothing is cut behind a hole: zeros are frames of eight bytes, and a file can claim a terabyte of them.
    """
    try:
        file, header = folder.open(index)
    except (CorruptionError, FileNotFoundError):
        return  # whoever reads it says so
    with file:
        at, hole = low, first_hole(file)
        if hole < file.stat().size:
            high = min(high, header.begin + hole - HEADER_BYTES)
        while header.method is None and high - at > span_bytes * 3 // 2:
            found = _hop(file, header, at, at + span_bytes, high)
            if found is None or found >= high:
                return
            at = found
            yield at


def _hop(file: ReadFile, header: Header, at: int, target: int, high: int) -> int | None:
    """Return the first frame at or behind ``target``, or None where the frames end before.

    Read with pread: the newest segment may be cut by a recovery.
    """
    while at < target:
        offset = HEADER_BYTES + at - header.begin
        data = file.read_at(offset, min(WINDOW_BYTES, target - at + FRAME_HEAD, high - at))
        if len(data) < FRAME_HEAD:
            return None
        hopped = kernel.hop_frames(data, 0, len(data), target - at)
        # A frame that reaches past what was read is passed by its length alone.
        at += hopped or FRAME_HEAD + int.from_bytes(data[:4], "big")
    return at
