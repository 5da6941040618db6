"""What was shipped of a log: one small object that is swapped, and pages that never change.

    <channel>.shipped.json                             the head: the only object that is swapped
    <channel>.pages/<first:16>-<hash:16>.json          a thousand entries each
    <channel>.segments/<first:16>-<hash:16>.<ending>   segments as they are, named after their bytes (BLAKE3)

Invariants:

1. Spans of entries follow one another without a hole, from ``first`` to ``next``; what an entry names is up before the
   entry is.
2. ``generation`` grows with every swap, so no two heads have the same bytes; ``epoch`` grows with every shipper that
   takes over, and one of a lower epoch never writes again.
3. An entry stays as it is once written, but the last one may grow while its log goes on in the same segment.

Worked example and reasons: docs/formats/ship-manifest.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import msgspec

from penstock.errors import CorruptionError, OptionsError, UnsupportedError
from penstock.log.xchannel.format import SMALLEST_PAGE

__all__ = [
    "HEAD_SUFFIX",
    "PAGE_ENTRIES",
    "Entry",
    "Extra",
    "Head",
    "PageRef",
    "Trash",
    "check_channel",
    "decode_head",
    "decode_page",
    "encode_head",
    "encode_page",
    "head_key",
    "object_key",
    "page_key",
]

VERSION: Final = 1
MOST_BYTES: Final = (1 << 63) - 1
HASH: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
LOG_ID: Final = re.compile(r"|[0-9a-f]{32}|folder-.*", re.ASCII)
KEY: Final = re.compile(r"[^\\\x00-\x1f]+\.(segments|pages)/[^/\\\x00-\x1f]+")
PAGE_HASH: Final = re.compile(r"-([0-9a-f]{16})\.json", re.ASCII)
HEAD_SUFFIX: Final = ".shipped.json"
MANIFEST_BYTES: Final = 64 << 20
"""No head and no page is as long as that."""
PAGE_ENTRIES: Final = 1000
"""How many entries the head holds before it turns them into a page."""


def _check_file(name: str, key: str, size: int, digest: str) -> None:
    """Refuse what no shipper writes; a manifest may come from anyone who can write to the bucket."""
    if not name or name in (".", "..") or any(char == "/" or ord(char) < 32 for char in name):
        raise ValueError(f"{name[:80]!r} is no name of a file")
    _check_key(key)
    if not 0 <= size <= MOST_BYTES:
        raise ValueError(f"{name}: {size} bytes")
    if not HASH.fullmatch(digest):
        raise ValueError(f"{name}: its blake3 is not 64 hex digits")


def _check_key(key: str) -> None:
    if not KEY.fullmatch(key) or any(part in ("", ".", "..") for part in key.split("/")):
        raise ValueError(f"{key[:80]!r} is no key of a shipped object")


def check_channel(channel: str) -> None:
    """Refuse the name of a channel whose objects could not be read back.

    >>> check_channel("ticks")
    """
    try:
        if channel.endswith(HEAD_SUFFIX):
            raise ValueError(f"it ends as the name of a manifest does: {HEAD_SUFFIX}")
        _check_key(object_key(channel, 0, "0" * 16, "log"))
    except ValueError as exc:
        raise OptionsError(f"{channel!r}: a log cannot be shipped under this name, give it another: {exc}") from None


def _check_span(key: str, first: int, following: int) -> None:
    if not 0 <= first < following <= MOST_BYTES:
        raise ValueError(f"{key} has no span: {first} to {following}")


class Extra(msgspec.Struct, frozen=True):
    """A file that goes with a segment, as the index of a message log.

    >>> Extra("00000000000000000001.idx", "ticks.segments/x.idx", 12, "ab" * 32).bytes
    12
    """

    name: str
    key: str
    bytes: int
    blake3: str

    def __post_init__(self) -> None:
        _check_file(self.name, self.key, self.bytes, self.blake3)


class Entry(msgspec.Struct, frozen=True):
    """One segment: its span of positions, what is in it, and where its bytes are.

    >>> Entry("ticks", "ticks.segments/x.xch", 80, 1 << 40, 3, 4096, "ab" * 32).records
    3
    """

    name: str
    """What the file is called in the log."""
    key: str
    first: int
    next: int
    records: int
    bytes: int
    blake3: str
    min_time_ns: int | None = None
    max_time_ns: int | None = None
    cuts: tuple[tuple[int, int], ...] = ()
    """Where spans of it begin that can be read by themselves, and how many bytes each takes."""
    extra: tuple[Extra, ...] = ()

    def __post_init__(self) -> None:
        _check_file(self.name, self.key, self.bytes, self.blake3)
        _check_span(self.key, self.first, self.next)


class PageRef(msgspec.Struct, frozen=True):
    """A page: a run of entries that moved out of the head.

    >>> PageRef("ticks.pages/x.json", 80, 160, 2, 8192, None, None).segments
    2
    """

    key: str
    first: int
    next: int
    segments: int
    bytes: int
    min_time_ns: int | None
    max_time_ns: int | None

    def __post_init__(self) -> None:
        _check_key(self.key)
        _check_span(self.key, self.first, self.next)


class Trash(msgspec.Struct, frozen=True):
    """An object that nothing names any more, and since when; it goes when its grace is over.

    >>> Trash("ticks.segments/x.log", 0).key
    'ticks.segments/x.log'
    """

    key: str
    at_ns: int
    is_page: bool = False
    """Whether it is a page, which goes together with everything it names."""

    def __post_init__(self) -> None:
        _check_key(self.key)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What was shipped of one log.

    >>> Head(log_id="", format="xchannel", content="raw", node="edge", channel="ticks", first=80, next=80).generation
    0
    """

    version: int = VERSION
    log_id: str
    format: str
    content: str
    node: str
    channel: str
    generation: int = 0
    epoch: int = 0
    shipper: str = ""
    """The random id of who wrote it."""
    first: int
    next: int
    records: int = 0
    """How many are up, from ``first`` to ``next``; what was forgotten counts no more, neither here nor in ``bytes``."""
    bytes: int = 0
    written_ns: int = 0
    seen: str = ""
    """The fingerprint of the last shipped record (log/fingerprint.py): a backup that comes back has another."""
    region_bytes: int = 0
    """Of an xchannel: the size of its regions, the same in all of its files."""
    pages: tuple[PageRef, ...] = ()
    segments: tuple[Entry, ...] = ()
    trash: tuple[Trash, ...] = ()


def head_key(channel: str) -> str:
    """Return where the head of a channel is.

    >>> head_key("ticks")
    'ticks.shipped.json'
    """
    return channel + HEAD_SUFFIX


def object_key(channel: str, first: int, digest: str, ending: str) -> str:
    """Return where a file of a segment is.

    >>> object_key("ticks", 80, "abcdef0123456789" * 4, "xch")
    'ticks.segments/0000000000000050-abcdef0123456789.xch'
    """
    return f"{channel}.segments/{first:016x}-{digest[:16]}.{ending}"


def page_key(channel: str, data: bytes, first: int) -> str:
    """Return where a page with these bytes is.

    >>> page_key("ticks", b"", 80)
    'ticks.pages/0000000000000050-af1349b9f5f9a1a6.json'
    """
    from blake3 import blake3

    return f"{channel}.pages/{first:016x}-{blake3(data).hexdigest()[:16]}.json"


def encode_head(head: Head) -> bytes:
    """Return a head as it is stored.

    >>> head = Head(log_id="", format="xchannel", content="raw", node="edge-1", channel="ticks", first=80, next=80)
    >>> decode_head(encode_head(head)) == head
    True
    """
    return msgspec.json.encode(head) + b"\n"


def decode_head(data: bytes, name: str = "head", channel: str | None = None) -> Head:
    """Read a head; CorruptionError for what is none, UnsupportedError for one of a later version."""
    try:
        head = msgspec.json.decode(data, type=Head)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        version = _version(data)
        if version > VERSION:
            raise UnsupportedError(f"{name}: a manifest of version {version} is not read by this release") from None
        raise CorruptionError(name, 0, f"not a manifest of shipped segments: {exc}") from None
    if head.version != VERSION:
        raise UnsupportedError(f"{name}: a manifest of version {head.version} is not read by this release")
    if channel is not None and head.channel != channel:
        raise CorruptionError(name, 0, f"it is the manifest of {head.channel!r}, not of {channel!r}")
    _check(head, name)
    return head


def _version(data: bytes) -> int:
    class Peek(msgspec.Struct):
        version: int = 0

    try:
        return msgspec.json.decode(data, type=Peek).version
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0


def _check_keys(channel: str, entries: Iterable[Entry], others: Iterable[str], name: str) -> None:
    """Refuse what names an object that is not the channel's own: nothing is trusted that was fetched."""
    keys = [key for entry in entries for key in (entry.key, *(extra.key for extra in entry.extra))]
    for key in (*keys, *others):
        if not key.startswith((f"{channel}.segments/", f"{channel}.pages/")):
            raise CorruptionError(name, 0, f"{key!r} is no key of an object of {channel!r}")


def _check(head: Head, name: str) -> None:
    """Refuse a head that no shipper writes: with holes between its spans, or naming what is not its own."""
    region, there = head.region_bytes, bool(head.pages or head.segments)
    if head.format == "xchannel" and (there or region) and (region % SMALLEST_PAGE or not 0 < region < 1 << 32):
        raise CorruptionError(name, 0, f"region_bytes {region} is the size of no region of a channel")
    if not LOG_ID.fullmatch(head.log_id):
        raise CorruptionError(name, 0, f"log_id {head.log_id[:80]!r} is none")
    others = [*(page.key for page in head.pages), *(item.key for item in head.trash)]
    _check_keys(head.channel, head.segments, others, name)
    at = head.first
    parts: tuple[PageRef | Entry, ...] = (*head.pages, *head.segments)
    for part in parts:
        if part.first != at:
            raise CorruptionError(name, 0, f"{part.key} begins at {part.first}, where {at} is next")
        at = part.next
    if at != head.next:
        raise CorruptionError(name, 0, f"the entries end at {at}, and next is {head.next}")


def encode_page(entries: tuple[Entry, ...]) -> bytes:
    """Return the bytes of a page.

    >>> decode_page(encode_page(()), "page", "ticks")
    ()
    """
    return msgspec.json.encode(entries) + b"\n"


def decode_page(data: bytes, name: str, channel: str) -> tuple[Entry, ...]:
    """Read a page of a channel.

    CorruptionError for what is none, for another one than ``name``, its key, has the hash of, or with holes in it.
    """
    from blake3 import blake3

    wanted = PAGE_HASH.search(name)
    if wanted is not None and blake3(data).hexdigest()[:16] != wanted[1]:
        raise CorruptionError(name, 0, "the page is not the one that was shipped: its name has another hash")
    try:
        entries = msgspec.json.decode(data, type=tuple[Entry, ...])
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise CorruptionError(name, 0, f"not a page of shipped segments: {exc}") from None
    _check_keys(channel, entries, (), name)
    for before, entry in pairwise(entries):
        if before.next != entry.first:
            raise CorruptionError(name, 0, f"{entry.key} begins at {entry.first}, where {before.next} is next")
    return entries
