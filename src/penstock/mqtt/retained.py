"""Retained messages: the last one of each topic, found by topic or by filter."""

from __future__ import annotations

from penstock.kernel.mqtt import Run
from penstock.mqtt.topics import TopicTree

__all__ = ["Kept", "RetainedMessages"]


class Kept:
    """The retained message of one topic; ``run`` is replaced in place, and None once it is gone."""

    __slots__ = ("run", "stored_ns")

    def __init__(self, run: Run, stored_ns: int) -> None:
        self.run: Run | None = run
        self.stored_ns = stored_ns


class RetainedMessages:
    """Topic → message, with a tree beside it for filters.

    >>> from penstock.kernel.mqtt import make_run
    >>> kept = RetainedMessages()
    >>> kept.put(make_run(b"a/b", [b"on"], 1, True), 0)
    >>> [each.run.payload() for each in kept.match("a/+")], len(kept), kept.payload_bytes
    ([b'on'], 1, 2)
    >>> kept.remove(b"a/b"), len(kept)
    (True, 0)
    """

    def __init__(self) -> None:
        self._by_topic: dict[bytes, Kept] = {}
        self._tree: TopicTree[Kept] = TopicTree()
        self.payload_bytes = 0

    def __len__(self) -> int:
        return len(self._by_topic)

    def get(self, topic: bytes) -> Run | None:
        """Return the message of a topic."""
        kept = self._by_topic.get(topic)
        return None if kept is None else kept.run

    def kept(self, topic: bytes) -> Kept | None:
        """Return the message of a topic with when it was stored."""
        return self._by_topic.get(topic)

    def topics(self) -> list[bytes]:
        """Return all topics that have one."""
        return list(self._by_topic)

    def put(self, run: Run, stored_ns: int) -> None:
        """Keep a run of one message under its topic."""
        kept = self._by_topic.get(run.topic)
        if kept is None:
            kept = self._by_topic[run.topic] = Kept(run, stored_ns)
            self._tree.put(run.topic.decode(), kept)
        else:
            if kept.run is not None:
                self.payload_bytes -= kept.run.payload_bytes
            kept.run, kept.stored_ns = run, stored_ns
        self.payload_bytes += run.payload_bytes

    def remove(self, topic: bytes) -> bool:
        """Forget a topic; return whether there was a message."""
        kept = self._by_topic.pop(topic, None)
        if kept is None:
            return False
        self._tree.remove(topic.decode())
        if kept.run is not None:
            self.payload_bytes -= kept.run.payload_bytes
        kept.run = None
        return True

    def match(self, filter: str) -> list[Kept]:
        """Return what the filter matches now; entries that go later have no run any more."""
        if "+" not in filter and "#" not in filter:
            kept = self._by_topic.get(filter.encode())
            return [] if kept is None else [kept]
        return list(self._tree.match(filter))
