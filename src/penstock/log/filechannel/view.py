"""A channel seen from beside its writer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.disk import Disk
from penstock.disk.doors import refuse_other
from penstock.errors import NotFoundError
from penstock.log.filechannel.ends import WatchedEnd
from penstock.log.filechannel.handle import QueueHandle
from penstock.log.filechannel.options import ChannelOptions

if TYPE_CHECKING:
    from penstock.log.filechannel.shared import SharedChannel

__all__ = ["ChannelView"]


class ChannelView(QueueHandle):
    """A channel seen from beside its writer: receivers wait by looking, and no segment is ever changed.

    Named receivers work here too: their cursors are files, and the writer collects nothing they still need.

    >>> import tempfile
    >>> from penstock.log.filechannel import FileChannel
    >>> folder = tempfile.TemporaryDirectory()
    >>> channel = FileChannel.open(folder.name)
    >>> view = FileChannel.attach(folder.name)
    >>> rx = view.ack_rx("mirror")
    >>> position = channel.append(b"hello")
    >>> rx.recv(timeout=5)
    b'hello'
    >>> rx.ack(); channel.stats().lag_bytes
    {'mirror': 0}
    >>> view.close(); channel.close(); folder.cleanup()
    """

    def __init__(self, path: str, disk: Disk) -> None:
        super().__init__(path, disk)
        found = disk.stat(path)
        if found is None or not found.is_folder:
            raise NotFoundError(f"{path}: there is no channel here")
        refuse_other(disk, path, "queue")
        self._end: WatchedEnd = WatchedEnd(self.folder, self._sidecar)

    def _send_again(self, payloads: list[bytes]) -> None:
        with open_shared(self.path, ChannelOptions(sync="always"), self._disk) as queue:
            queue.append_many(payloads)

    def close(self) -> None:
        """Close its receivers."""
        self._close_groups()
        self._end.closed = self._end.closed or "the view of the channel is closed"
        for receiver in self.open_receivers():
            receiver.close()
        self._sidecar.close()

    def forked(self) -> None:
        """Close in the child of a fork."""
        self._end.closed = "the view was opened before a fork: open its own in the child"


def open_shared(path: str, options: ChannelOptions, disk: Disk) -> SharedChannel:
    """Open a queue to send into it in turns."""
    from penstock.log.filechannel.shared import SharedChannel

    return SharedChannel(path, options, disk)
