"""What a broker counts: plain integers, because they are raised for every run."""

from __future__ import annotations

__all__ = ["Counts"]


class Counts:
    """Totals since the broker began."""

    __slots__ = (
        "bytes_received",
        "bytes_sent",
        "connections",
        "dropped",
        "messages_received",
        "messages_sent",
        "publish_bytes_received",
        "publish_bytes_sent",
        "publish_received",
        "publish_sent",
        "refused",
        "sessions_expired",
    )

    def __init__(self) -> None:
        self.bytes_received = self.bytes_sent = 0
        self.messages_received = self.messages_sent = 0
        self.publish_received = self.publish_sent = 0
        self.publish_bytes_received = self.publish_bytes_sent = 0
        self.connections = self.sessions_expired = 0
        self.dropped: dict[str, int] = {}
        self.refused: dict[str, int] = {}

    @property
    def all_dropped(self) -> int:
        """Messages that some session did not get, for whatever reason."""
        return sum(self.dropped.values())
