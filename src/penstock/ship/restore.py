"""Bringing a span of a shipped log back to a local one: whole segments, compared with their hashes, same positions."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from penstock.disk import disk_for
from penstock.disk.failpoint import fail_point
from penstock.disk.posix import folder_of
from penstock.disk.tree import check_vacant, put_in_place, staged, sync_tree
from penstock.errors import ExpiredError, OptionsError
from penstock.log.sidecar import Identity
from penstock.log.xchannel.files import discover
from penstock.log.xchannel.format import ChannelHeader, file_path, split_position
from penstock.ship.manifest import Entry
from penstock.ship.remote import ShippedLog
from penstock.ship.shippeddisk import ShippedDisk

__all__ = ["restore_span"]

COPY_BYTES = 1 << 20


def restore_span(
    place: str | os.PathLike[str],
    path: str | os.PathLike[str],
    start: int | None = None,
    end: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[int, int]:
    """Fetch the segments that hold a span, all that is kept unless told otherwise; return the span they hold.

    The log at ``path`` must not exist.  It has the id of the one that was shipped, so cursors of that one count.

    >>> restore_span("/nowhere/ticks", "/nowhere/copy")
    Traceback (most recent call last):
    penstock.errors.NotFoundError: /nowhere/ticks: nothing was shipped here
    """
    path = os.fspath(path).rstrip("/")
    with ShippedLog(place) as log:
        start = log.first_position if start is None else start
        end = log.next_position if end is None else end
        if start < log.first_position:
            raise ExpiredError(log.path, start, log.first_position)
        entries = log.entries(start, end)
        if not entries:
            raise OptionsError(f"{log.path}: nothing was shipped between {start} and {end}")
        check_vacant(path)
        if log.format == "xchannel" and discover(disk_for(path), path):
            raise OptionsError(f"{path}: a channel is here already, though its first file is gone")
        with staged(path, "restore") as stage:
            made = stage + "/log"
            os.mkdir(made, 0o700)
            _fetch(log, entries, made, os.path.basename(path), progress)
            sync_tree(made)
            fail_point("ship.restore.staged")
            if log.format == "xchannel":
                _spread(made, path)
            else:
                put_in_place(made, path)
    return entries[0].first, entries[-1].next


def _fetch(log: ShippedLog, entries: list[Entry], folder: str, base: str, progress: Callable[[int], None]) -> None:
    head, disk = log.head, disk_for(folder)
    for entry in entries:
        shipped = ShippedDisk(log._store, log.path)
        shipped.show(head, (entry,))
        root = folder_of(log.path) if head.format == "xchannel" else log.path
        try:
            for name in [entry.name, *(extra.name for extra in entry.extra)]:
                target = base + name.removeprefix(log.channel) if head.format == "xchannel" else name
                with shipped.open(f"{root}/{name}") as source, disk.create(f"{folder}/{target}") as file:
                    at = 0
                    while data := source.read_at(at, COPY_BYTES):
                        file.write_at(at, data)
                        progress(len(data))
                        at += len(data)
        finally:
            shipped.close()
    if head.format == "xchannel":
        # The last file ends with a Roll: a file without a record follows, which a writer can go on in.
        sequence, _ = split_position(entries[-1].next)
        with disk.create(file_path(f"{folder}/{base}", sequence)) as file:
            file.truncate(head.region_bytes)
            file.write_at(0, ChannelHeader.fresh(sequence, head.region_bytes, 0).encode())
    if head.log_id and not head.log_id.startswith("folder-"):
        name = f"{base}.penstock-id" if head.format == "xchannel" else "penstock-id"
        with disk.create(f"{folder}/{name}") as file:
            file.write_at(0, msgspec.json.encode(Identity(head.log_id, head.content, 0)) + b"\n")


def _spread(made: str, path: str) -> None:
    """Put the files of a channel beside each other, the first of its row last: until then it is no channel."""
    disk, folder = disk_for(path), folder_of(path)
    names = sorted(disk.list(made), key=lambda name: (name == os.path.basename(path), name))
    for name in names:
        if disk.stat(f"{folder}/{name}") is not None:
            raise OptionsError(f"{folder}/{name}: something is here already")
    for name in names:
        disk.rename(f"{made}/{name}", f"{folder}/{name}")
    disk.sync_folder(folder)
