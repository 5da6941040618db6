"""A channel store that fails on demand."""

from __future__ import annotations

from collections.abc import Callable

from penstock.channels import ChannelStore, PersistedChannel

__all__ = ["FailingChannelStore"]


class FailingChannelStore:
    """Another store that fails on demand: set ``fail["save"]`` to the error the next saves shall raise.

    >>> from penstock.channels import MemoryChannelStore, PersistedChannel
    >>> store = FailingChannelStore(MemoryChannelStore())
    >>> store.fail["save"] = OSError(28, "No space left on device")
    >>> store.save(PersistedChannel("jobs"))
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device
    >>> store.fail.clear(); store.hashes()
    []
    """

    def __init__(self, inner: ChannelStore) -> None:
        self._inner = inner
        self.fail: dict[str, BaseException] = {}
        """Operation (save, delete, hashes, load) → what it raises until the entry is removed."""

    def save(self, channel: PersistedChannel) -> str:
        """Replace the metadata of a channel, or fail before anything changes."""
        self._check("save")
        return self._inner.save(channel)

    def delete(self, hash: str, first: Callable[[], None] | None = None) -> None:
        """Delete a channel, or fail before anything changes."""
        self._check("delete")
        self._inner.delete(hash, first)

    def hashes(self) -> list[str]:
        """Return the hashes of all channels, or fail."""
        self._check("hashes")
        return self._inner.hashes()

    def load(self, hash: str) -> PersistedChannel:
        """Return the metadata of one channel, or fail."""
        self._check("load")
        return self._inner.load(hash)

    def _check(self, operation: str) -> None:
        if operation in self.fail:
            raise self.fail[operation]
