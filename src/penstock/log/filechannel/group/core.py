"""What a group decides: which message goes to whom, and which are finished.  No file, no clock, no lock in here.

    unread ── take ──► leased ── done ──► finished
                        │  ▲
                  fail, │  │ take, once it may
            its lease ends │
                        ▼  │
                       waiting ── buried ──► finished

Messages below ``next`` that have no entry are finished.  Every method that decides also applies its decision and notes
it as events; whoever calls writes them to the journal (``drain``) and lets others ``apply`` them.  Time comes as an
argument: ``now`` in seconds of a clock that only goes forward, ``now_ns`` of the wall clock for what is shown.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from penstock.log.filechannel.group.format import (
    VERSION,
    Cut,
    Done,
    Event,
    Failed,
    GroupSnapshot,
    Released,
    Renewed,
    Seen,
    Taken,
    Unfinished,
)

__all__ = ["GroupCore", "LEASE_ENDED"]

LEASE_ENDED = "its lease ended"
OLD_ITEMS = 256


class GroupCore:
    """The state of one group.

    Invariants:

    1. A message has at most one lease; one that ended is noted as ended before the message goes to another worker.
    2. Every message below ``next`` is finished or has an entry; none above has one.
    3. With ``ordered``, of the unfinished messages of a key only the first is ever handed out.

    >>> core = GroupCore(start=0)
    >>> (lease,) = core.take([0], next_position=11, worker="ann", now=0.0, now_ns=0, seconds=30.0)
    >>> core.pick(now=29.0, limit=1), core.overdue(now=31.0)
    ([], [0])
    >>> core.finish({0: lease.token}), core.floor
    ([], 11)
    """

    def __init__(self, start: int, *, ordered: bool = False) -> None:
        self.next, self.serial, self.ordered = start, 0, ordered
        self.entries: dict[int, Unfinished] = {}
        self._events: list[Event] = []
        self._rebuild()

    # --- What is known

    @property
    def floor(self) -> int:
        """The position of the first message that is not finished."""
        order = self._order
        while order and order[0] not in self.entries:
            heapq.heappop(order)
        return order[0] if order else self.next

    def due(self, now: float) -> float | None:
        """Return in how many seconds something changes by itself: a lease ends, or a delay; None when nothing does."""
        if self._peek_ready():
            return 0.0
        self._clean(self._leases, leased=True)
        self._clean(self._later, leased=False)
        nearest = min((heap[0][0] for heap in (self._leases, self._later) if heap), default=None)
        return None if nearest is None else max(0.0, nearest - now)

    # --- Handing out

    def overdue(self, now: float) -> list[int]:
        """Return the messages whose lease has ended."""
        found = []
        heap = self._leases
        while heap and heap[0][0] <= now:
            until, position = heapq.heappop(heap)
            entry = self.entries.get(position)
            if entry is not None and entry.leased and entry.until == until:
                found.append(position)
        for position in found:  # whoever asks may decide not to act on it
            heapq.heappush(heap, (self.entries[position].until, position))
        return found

    def release(self, positions: Sequence[int], reason: str = LEASE_ENDED) -> None:
        """End leases: the messages wait again, and may be handed out at once."""
        if positions:
            self._do(Released(list(positions), reason))

    def pick(self, now: float, limit: int) -> list[int]:
        """Return messages that wait and may be handed out now, the oldest first; ``take`` must follow."""
        later, entries = self._later, self.entries
        while later and later[0][0] <= now:
            until, position = heapq.heappop(later)
            entry = entries.get(position)
            if entry is not None and not entry.leased and entry.until == until:
                self._make_ready(entry)
        found: list[int] = []
        while len(found) < limit and self._peek_ready():
            position = heapq.heappop(self._ready)
            if not found or found[-1] != position:  # an old item of the heap
                found.append(position)
        return found

    def see(self, positions: Sequence[int], keys: Sequence[bytes | None], next_position: int) -> None:
        """Note messages that were read, each with its key."""
        if positions or next_position != self.next:
            self._do(Seen(next_position, list(positions), list(keys)))

    def pass_over(self, next_position: int) -> None:
        """Go on behind what is damaged or gone, if nothing was read behind it yet."""
        if next_position > self.next:
            self._do(Seen(next_position, [], []))

    def take(
        self, positions: Sequence[int], next_position: int, worker: str, now: float, now_ns: int, seconds: float
    ) -> list[Unfinished]:
        """Hand out messages: picked ones, and those just read before ``next_position``.  Returns copies of entries."""
        self._do(Taken(next_position, list(positions), worker, now + seconds, self.serial + 1, now_ns))
        return [msgspec.structs.replace(self.entries[position]) for position in positions]

    # --- What workers say

    def finish(self, tokens: dict[int, int]) -> list[int]:
        """Finish the messages by their leases; return the positions of leases that are no longer theirs."""
        held, lost = self._held(tokens)
        if held:
            self._do(Done(held))
        return lost

    def bury(self, positions: Sequence[int]) -> None:
        """Finish messages that lie among the dead letters by now."""
        if positions:
            self._do(Done(list(positions)))

    def fail(self, tokens: dict[int, int], now: float, now_ns: int, delay: float, reason: str) -> list[int]:
        """Let messages wait again, for ``delay`` seconds; return the positions of leases that are no longer theirs."""
        held, lost = self._held(tokens)
        if held:
            self._do(Failed(held, now + delay, delay, now_ns, reason))
        return lost

    def renew(self, tokens: dict[int, int], now: float, seconds: float) -> list[int]:
        """Let leases go on; return the positions of those that have ended."""
        held, lost = self._held(tokens)
        ended = [position for position in held if not self.entries[position].leased]
        if ended:  # nobody has taken it since, but it was given back
            held = [position for position in held if self.entries[position].leased]
        if held:
            self._do(Renewed(held, now + seconds))
        return lost + ended

    def _held(self, tokens: dict[int, int]) -> tuple[list[int], list[int]]:
        """Sort leases into those whose message nobody has got since, and the others."""
        held: list[int] = []
        lost: list[int] = []
        for position, token in tokens.items():
            entry = self.entries.get(position)
            (held if entry is not None and entry.token == token else lost).append(position)
        return held, lost

    # --- After a restart

    def start_again(self, now: float, now_ns: int) -> None:
        """Go on in another life of the machine: no worker lives any more, and delays go by the wall clock."""
        for entry in self.entries.values():
            if entry.leased:
                entry.leased, entry.until, entry.delay, entry.reason = False, 0.0, 0.0, LEASE_ENDED
            elif entry.delay:
                left = entry.delay - (now_ns - entry.since_ns) / 1e9
                entry.until = now + min(entry.delay, max(0.0, left))
            else:
                entry.until = 0.0
        self._rebuild()

    def cut(self, end: int) -> None:
        """Forget what was behind the end of the queue: other messages will have those positions."""
        if end < self.next:
            self._do(Cut(end))

    # --- Journal

    def drain(self) -> list[Event]:
        """Return the events of what was decided since the last time."""
        events, self._events = self._events, []
        return events

    def snapshot(self, log_id: bytes, boot: bytes) -> GroupSnapshot:
        """Return everything there is to know."""
        entries = [self.entries[position] for position in sorted(self.entries)]
        return GroupSnapshot(VERSION, log_id, boot, self.ordered, self.next, self.serial, entries)

    @classmethod
    def restore(cls, snapshot: GroupSnapshot) -> GroupCore:
        """Return the state that a snapshot tells."""
        core = cls(snapshot.next, ordered=snapshot.ordered)
        core.serial = snapshot.serial
        core.entries = {entry.position: entry for entry in snapshot.entries}
        core._rebuild()
        return core

    def apply(self, event: Event) -> None:
        """Do what an event says: one of our own decisions, or one of another process."""
        match event:
            case Taken():
                self._apply_taken(event)
            case Done():
                for position in event.positions:
                    self._remove(position)
            case Seen():
                for position, key in zip(event.positions, event.keys, strict=True):
                    self._add(Unfinished(position, key=key))
                self.next = event.next
            case Failed():
                self._wait(event.positions, event.until, event.delay, event.at_ns, event.reason)
            case Released():
                self._wait(event.positions, 0.0, 0.0, 0, event.reason)
            case Renewed():
                for position in event.positions:
                    entry = self.entries[position]
                    entry.until = event.until
                    heapq.heappush(self._leases, (entry.until, position))
            case Cut():
                for position in [position for position in self.entries if position >= event.next]:
                    self._remove(position)
                self.next = event.next
        self._prune()

    def _do(self, event: Event) -> None:
        self.apply(event)
        self._events.append(event)

    def _apply_taken(self, event: Taken) -> None:
        token = event.serial
        for position in event.positions:
            entry = self.entries.get(position)
            if entry is None:
                entry = self.entries[position] = Unfinished(position)
                heapq.heappush(self._order, position)
            entry.tries += 1
            entry.leased, entry.token, entry.worker, entry.until = True, token, event.worker, event.until
            entry.since_ns, entry.delay = event.at_ns, 0.0
            entry.first_ns = entry.first_ns or event.at_ns
            heapq.heappush(self._leases, (event.until, position))
            token += 1
        self.serial, self.next = token - 1, event.next

    def _wait(self, positions: Iterable[int], until: float, delay: float, at_ns: int, reason: str) -> None:
        for position in positions:
            entry = self.entries[position]
            entry.leased, entry.until, entry.delay, entry.reason = False, until, delay, reason
            entry.since_ns = at_ns or entry.since_ns
            self._put_aside(entry)

    # --- What is found quickly.  Heaps keep old items; whoever takes one from them checks it against its entry.

    def _rebuild(self) -> None:
        self._order = sorted(self.entries)
        self._ready: list[int] = []
        self._later: list[tuple[float, int]] = []
        self._leases: list[tuple[float, int]] = []
        self._by_key: dict[bytes, deque[int]] = {}
        for position in self._order:
            entry = self.entries[position]
            if entry.key is not None:
                self._by_key.setdefault(entry.key, deque()).append(position)
            if entry.leased:
                heapq.heappush(self._leases, (entry.until, position))
            else:
                self._put_aside(entry)

    def _prune(self) -> None:
        """Drop the old items of a heap once most of its items are old: an hour's lease must not keep an hour's work."""
        most, entries = 2 * len(self.entries) + OLD_ITEMS, self.entries
        if len(self._order) > most:
            self._order = sorted(entries)
        if len(self._ready) > most:
            self._ready = [p for p in sorted(set(self._ready)) if p in entries and not entries[p].leased]
        if len(self._leases) > most:
            self._leases = sorted((entry.until, p) for p, entry in entries.items() if entry.leased)
        if len(self._later) > most:
            waiting = ((entry.until, p) for p, entry in entries.items() if entry.until and not entry.leased)
            self._later = sorted(waiting)

    def _add(self, entry: Unfinished) -> None:
        self.entries[entry.position] = entry
        heapq.heappush(self._order, entry.position)
        if entry.key is not None:
            self._by_key.setdefault(entry.key, deque()).append(entry.position)
        self._put_aside(entry)

    def _remove(self, position: int) -> None:
        entry = self.entries.pop(position)
        if entry.key is None:
            return
        line = self._by_key[entry.key]
        was_first = line[0] == position
        line.remove(position)
        if not line:
            del self._by_key[entry.key]
        elif was_first:
            self._put_aside(self.entries[line[0]])

    def _put_aside(self, entry: Unfinished) -> None:
        """Keep a waiting message where it is found again: at once, or after its delay."""
        if entry.leased:
            return
        if entry.until:
            heapq.heappush(self._later, (entry.until, entry.position))
        else:
            self._make_ready(entry)

    def _make_ready(self, entry: Unfinished) -> None:
        entry.until = 0.0
        if entry.key is None or self._by_key[entry.key][0] == entry.position:
            heapq.heappush(self._ready, entry.position)

    def _peek_ready(self) -> bool:
        """Whether the first of the ready ones may be handed out; what may not is dropped."""
        ready = self._ready
        while ready:
            entry = self.entries.get(ready[0])
            if entry is not None and not entry.leased and not entry.until:
                return True
            heapq.heappop(ready)
        return False

    def _clean(self, heap: list[tuple[float, int]], *, leased: bool) -> None:
        while heap:
            entry = self.entries.get(heap[0][1])
            if entry is not None and entry.leased is leased and entry.until == heap[0][0]:
                return
            heapq.heappop(heap)
