"""Every channel of a data directory, good or not, for those who only look: nothing is swept or mended."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.channels.model import PersistedChannel
from penstock.channels.store import METADATA, FileChannelStore, channel_hash
from penstock.disk import Disk, disk_for
from penstock.errors import CorruptionError, NotFoundError, PenstockError

__all__ = ["survey"]


def survey(root: str, disk: Disk | None = None) -> Iterator[tuple[str, PersistedChannel | PenstockError | OSError]]:
    """Yield the name of each channel's folder with its metadata, or with what stands in the way of reading it.

    >>> from penstock.disk import MemoryDisk
    >>> disk = MemoryDisk()
    >>> folder = FileChannelStore("data", disk).save(PersistedChannel("jobs"))
    >>> [(name == folder, channel.handler) for name, channel in survey("data", disk)]
    [(True, 'jobs')]
    """
    disk = disk or disk_for(root)
    found = disk.stat(root)
    if found is None or not found.is_folder:
        raise NotFoundError(f"{root}: there is no such data directory")
    store = FileChannelStore(root, disk)
    for name in disk.list(root):
        if disk.stat(f"{root}/{name}/{METADATA}") is None:
            continue
        try:
            channel = store.load(name)
            if channel_hash(channel.handler) != name:
                raise CorruptionError(store.folder(name), 0, f"the folder is not that of {channel.handler!r}")
            yield name, channel
        except (PenstockError, OSError) as exc:
            yield name, exc
