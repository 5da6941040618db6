"""What a broker counts: plain integers, because they are raised for every run."""

from __future__ import annotations

from penstock.kernel.mqttrelay import Traffic

__all__ = ["Counts"]


class Counts(Traffic):
    """Totals since the broker began; what came and went is counted by its kernel as well."""

    __slots__ = ("connections", "dropped", "refused", "sessions_expired")

    def __init__(self) -> None:
        self.connections = self.sessions_expired = 0
        self.dropped: dict[str, int] = {}
        self.refused: dict[str, int] = {}

    @property
    def all_dropped(self) -> int:
        """Messages that some session did not get, for whatever reason."""
        return sum(self.dropped.values())
