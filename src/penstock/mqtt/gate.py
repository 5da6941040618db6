"""The gate: what promises something to a client leaves when it is kept, and not before.

A turn is what one pass of the event loop decided.  Answers go through ``Answers.write`` and wait for the end of their
turn.  Then each step of the gate (the journal, a tap) is told ``end_turn``: it hands all changes of the turn to the
operating system in one write, and returns a future where the answers wait for the disk as well (``sync="always"``, by
the group commit).  Turns leave in order; the next one is read and decided meanwhile.

    decide ── hold ──► end of turn: every step writes ──► futures of the steps ──► out
                                └── a step raises: publishers are cut off without an answer, the rest waits; tried again

**How a tap uses it.**  While a publish of QoS 1 or 2 is being decided, whoever must have the message first asks for a
ticket; the acknowledgement of this one publish, and whatever goes to its publisher after it, waits for that ticket
beside everything else:

    ticket = broker.gate.ticket()        # in the call by which the broker hands a run of QoS 1 or 2 to the tap
    ...
    ticket.done()                        # the log has it
    ticket.refuse(Reason.QUOTA_EXCEEDED) # or: 0x97 to a client of version 5; one of 3.1.1 is closed without an answer

A tap that writes once a turn is a step (``gate.steps.append(tap)``): ``end_turn`` is where it does its one
``append_many``, and calls ``done`` or ``refuse`` of the tickets it gave out since.  It returns None: a future makes
*everybody's* answers of the turn wait, a ticket only those to one publisher.  A step of a tap does not raise.  A ticket
that is neither done nor refused blocks that publisher, and nobody else.  Tickets are settled on the loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.net.connection import Connection

__all__ = ["Answers", "Gate", "Loop", "OpenGate", "GateStep", "Ticket", "TurnGate"]

_log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.25
"""How long a step that could not write is left alone."""

MOST_HELD: Final = 64 << 20
"""Above this many bytes of answers that wait, the clients they are for are not read from."""


class Loop(Protocol):
    """What a gate needs of an event loop."""

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Any: ...  # noqa: D102
    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Any: ...  # noqa: D102
    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any) -> Any: ...  # noqa: D102


class GateStep(Protocol):
    """What has something to write at the end of a turn."""

    def end_turn(self) -> Future[Any] | None:
        """Write what was gathered, in one call; return what all answers of the turn wait for besides."""


class HoldsReading(Protocol):
    """Who can be told to read nothing more for a while; each hold is ended once."""

    def hold_reading(self) -> None:
        """Read nothing more for now."""

    def go_on_reading(self) -> None:
        """End a hold."""


class Ticket:
    """One thing that the acknowledgement of one publish waits for."""

    __slots__ = ("_answers", "open", "reason")

    def __init__(self) -> None:
        self.open, self.reason = True, 0
        self._answers: tuple[Answers, ...] = ()

    def wake(self, answers: Answers) -> None:
        """Tell these when it is settled: of every connection over which the message came."""
        if answers not in self._answers:
            self._answers += (answers,)

    def done(self) -> None:
        """Let the acknowledgement go, as far as this ticket is concerned."""
        self._settle(0)

    def refuse(self, reason: int) -> None:
        """Have the publish refused with this reason code; what was decided about it otherwise stays."""
        self._settle(reason)

    def _settle(self, reason: int) -> None:
        if self.open:
            self.open, self.reason = False, reason
            for answers in self._answers:
                answers.go_on()


class _PublishAck:
    """The acknowledgement of a publish."""

    __slots__ = ("data", "refuse", "tickets")

    def __init__(self, data: bytes, refuse: Callable[[int], None], tickets: list[Ticket]) -> None:
        self.data, self.refuse, self.tickets = data, refuse, tickets


class _LastWords:
    """What is said to a connection that closes, whatever waits for a ticket before it."""

    __slots__ = ("data", "why")

    def __init__(self, data: bytes, why: str) -> None:
        self.data, self.why = data, why


_MayWait = bytes | memoryview | _PublishAck | Callable[[], None]
_Item = _MayWait | _LastWords


class Answers(Protocol):
    """What leaves through the gate to one connection, in order."""

    unkept: Callable[[], None] | None
    """Called when a publish of this connection could not be kept: the connection has to end without an answer."""
    reader: HoldsReading | None
    """Who is held while too much waits; None where each publish waits for its answer anyway."""

    @property
    def write(self) -> Callable[[bytes | memoryview], None]:
        """Send bytes that promise something: acknowledgements, CONNACK, PUBLISH of QoS 1 and 2."""

    def tell(self, data: bytes) -> bool:
        """Send bytes that promise nothing that is kept; return whether they have left.

        While the disk takes nothing they leave at once, unless something before them waits.
        """

    def acknowledge(self, data: bytes, refuse: Callable[[int], None], also: Sequence[Ticket] = ()) -> list[Ticket]:
        """Send the acknowledgement of a publish; its tickets are those asked for since the one before, and ``also``.

        They are returned: the same message may come again while some are open.
        """

    def call(self, action: Callable[[], None]) -> None:
        """Do something when everything before it has left."""

    def close(self, why: str) -> None:
        """Close the connection when everything before has left."""

    def close_with(self, data: bytes, why: str) -> None:
        """Send this and close the connection, when everything before has left that waits for no ticket."""

    def go_on(self) -> None:
        """Look again whether what waits for a ticket may leave; for tickets."""


class Gate(Protocol):
    """Where answers wait."""

    waits: bool
    """Whether an answer may leave later than it was written."""
    steps: list[GateStep]

    def answers(self, connection: Connection) -> Answers:
        """Return the way out to a connection."""

    def ticket(self) -> Ticket:
        """Have the acknowledgement of the publish that is being decided wait for something."""


class _Straight:
    """Answers that leave at once."""

    __slots__ = ("_connection", "reader", "unkept", "write")

    def __init__(self, connection: Connection) -> None:
        self._connection, self.write = connection, connection.write
        self.unkept: Callable[[], None] | None = None
        self.reader: HoldsReading | None = None

    def tell(self, data: bytes) -> bool:
        self._connection.write(data)
        return True

    def acknowledge(
        self,
        data: bytes,
        refuse: Callable[[int], None],  # noqa: ARG002  (nothing refuses)
        also: Sequence[Ticket] = (),  # noqa: ARG002
    ) -> list[Ticket]:
        self._connection.write(data)
        return []

    def call(self, action: Callable[[], None]) -> None:
        action()

    def close(self, why: str) -> None:
        self._connection.close(why)

    def close_with(self, data: bytes, why: str) -> None:
        if data:
            self._connection.write(data)
        self._connection.close(why)

    def go_on(self) -> None: ...


class OpenGate:
    """A gate for a broker that keeps nothing: answers leave at once, and there are no tickets.

    >>> OpenGate().waits
    False
    """

    waits = False

    def __init__(self) -> None:
        self.steps: list[GateStep] = []

    def answers(self, connection: Connection) -> Answers:
        """Return the connection's own write."""
        return _Straight(connection)

    def ticket(self) -> Ticket:
        """Refuse: what must wait needs a TurnGate."""
        raise RuntimeError("a broker with an open gate holds nothing back")


class _Held:
    """Answers that wait for their turn."""

    __slots__ = ("_behind", "_connection", "_gate", "reader", "unkept")

    def __init__(self, gate: TurnGate, connection: Connection) -> None:
        self._gate, self._connection = gate, connection
        self._behind: deque[_MayWait] | None = None
        self.unkept: Callable[[], None] | None = None
        self.reader: HoldsReading | None = None

    def write(self, data: bytes | memoryview) -> None:
        gate = self._gate
        gate.hold(self, data)
        gate.held_bytes += len(data)
        if gate.held_bytes > MOST_HELD:
            gate.pause(self.reader)

    def tell(self, data: bytes) -> bool:
        if self._passes_trouble():
            self._connection.write(data)
            return True
        self.write(data)
        return False

    def _passes_trouble(self) -> bool:
        """Whether the gate is shut for long, and nothing of this connection waits at it."""
        return bool(self._gate.trouble) and self._behind is None and not self._gate.holds(self)

    def acknowledge(self, data: bytes, refuse: Callable[[int], None], also: Sequence[Ticket] = ()) -> list[Ticket]:
        gate = self._gate
        tickets, gate.tickets = gate.tickets, []
        tickets += also
        gate.held_bytes += len(data)
        gate.hold(self, _PublishAck(data, refuse, tickets))
        return tickets

    def call(self, action: Callable[[], None]) -> None:
        self._gate.hold(self, action)

    def close(self, why: str) -> None:
        if self._passes_trouble():
            self._connection.close(why)
        else:
            self._gate.hold(self, lambda: self._connection.close(why))

    def close_with(self, data: bytes, why: str) -> None:
        words = _LastWords(data, why)
        if self._passes_trouble():
            self._say_last(words)
        else:
            self._gate.hold(self, words)

    def _say_last(self, words: _LastWords) -> None:
        if words.data:
            self._connection.write(words.data)
        self._connection.close(words.why)

    def let_out(self, item: _Item) -> None:
        """Take an item whose turn has come."""
        if isinstance(item, bytes) and self._behind is None:
            self._gate.held_bytes -= len(item)
            self._connection.write(item)
        elif isinstance(item, _LastWords):  # what waits for a ticket stays: to refuse it is more than to say so
            self._say_last(item)
        elif self._behind is not None:
            self._behind.append(item)
        elif not self._pass(item):
            self._behind = deque([item])

    def go_on(self) -> None:
        behind = self._behind
        if behind is None:
            return
        while behind:
            try:
                if not self._pass(behind[0]):
                    break
            except Exception as exc:  # noqa: BLE001 - whoever settles tickets has others to settle
                self.give_up(exc)
            behind.popleft()
        if not behind:
            self._behind = None

    def give_up(self, fault: Exception) -> None:
        """End a connection to which something could not be sent."""
        _log.error("an answer cannot be sent", exc_info=fault)
        self._connection.abort(f"a fault: {type(fault).__name__}: {fault}")

    def _pass(self, item: _MayWait) -> bool:
        if isinstance(item, bytes | memoryview):
            self._gate.held_bytes -= len(item)
            self._connection.write(item)
        elif isinstance(item, _PublishAck):
            reason = 0
            for ticket in item.tickets:
                if ticket.open:
                    ticket.wake(self)
                    return False
                reason = reason or ticket.reason
            self._gate.held_bytes -= len(item.data)
            if reason:
                item.refuse(reason)
            else:
                self._connection.write(item.data)
        else:
            item()
        return True

    def cut(self) -> None:
        """End the connection without an answer: what it published is not kept."""
        unkept, self.unkept = self.unkept, None
        if unkept is not None:
            unkept()


class _Turn:
    __slots__ = ("futures", "items", "written")

    def __init__(self, items: list[tuple[_Held, _Item]]) -> None:
        self.items, self.written = items, False
        self.futures: list[Future[Any]] = []


class TurnGate:
    """A gate that opens once a turn, when its steps have written.

    Invariants:

    1. No answer leaves before every step has written what was told to it before that answer.
    2. Answers to one connection leave in the order in which they were written.
    3. A publish whose turn could not be kept is never acknowledged.
    """

    waits = True

    def __init__(self, loop: Loop) -> None:
        self.steps: list[GateStep] = []
        self.tickets: list[Ticket] = []
        self.held_bytes = 0
        self.trouble = ""
        """Why the last turn could not be written, until one is."""
        self.before_writing: Callable[[], None] | None = None
        """Called before the steps write: what waits for no disk leaves while they do."""
        self.on_trouble: Callable[[], None] | None = None
        """Called when trouble begins, changes or is over."""
        self._loop = loop
        self._held: list[tuple[_Held, _Item]] = []
        self._turns: deque[_Turn] = deque()
        self._paused: set[HoldsReading] = set()
        self._called = self._retrying = self._closed = False

    # --- While a turn is decided

    def answers(self, connection: Connection) -> Answers:
        """Return the way out to a connection."""
        return _Held(self, connection)

    def ticket(self) -> Ticket:
        """Have the acknowledgement of the publish that is being decided wait for something."""
        ticket = Ticket()
        self.tickets.append(ticket)
        return ticket

    def hold(self, answers: _Held, item: _Item) -> None:
        """Let something wait for the end of the turn."""
        self._held.append((answers, item))
        if not self._called:
            self.changed()

    def holds(self, answers: _Held) -> bool:
        """Whether something to a connection waits; looks through everything that does."""
        held = chain(self._held, *(turn.items for turn in self._turns))
        return any(each is answers for each, _ in held)

    def changed(self) -> None:
        """Have the turn ended soon: something was told to a step, with an answer or without."""
        if not self._called:
            self._called = True
            self._loop.call_soon(self.end_turn)

    def changed_elsewhere(self) -> None:
        """Have the turn ended soon; from any thread."""
        self._loop.call_soon_threadsafe(self.changed)

    def pause(self, reader: HoldsReading | None) -> None:
        """Read no more from a connection until what is held has left."""
        if reader is not None and reader not in self._paused:
            self._paused.add(reader)
            reader.hold_reading()

    @property
    def busy(self) -> bool:
        """Whether something waits."""
        return bool(self._held or self._turns or self._called)

    # --- The end of a turn

    def end_turn(self) -> None:
        """Let every step write, and what waits leave as soon as it may."""
        self._called = False
        if self._closed:
            return
        if self.before_writing is not None:
            self.before_writing()
        turn = _Turn(self._held)
        self._held = []
        self._turns.append(turn)
        try:
            futures = [future for step in self.steps if (future := step.end_turn()) is not None]
        except (OSError, PenstockError) as exc:
            self._failed(str(exc))
            return
        except Exception as exc:  # noqa: BLE001 - no memory, for one: whatever it is, the turn is not written
            self._failed(str(exc) or type(exc).__name__, exc)
            return
        if self.trouble:
            _log.warning("written again, after: %s", self.trouble)
            self._note_trouble("")
        for each in self._turns:
            if not each.written:  # those that failed before have been written with this one
                each.written, each.futures = True, list(futures)
        for future in futures:
            future.add_done_callback(self._came)
        self._release()

    def _came(self, _: Future[Any]) -> None:
        self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        turns = self._turns
        while turns and turns[0].written and all(future.done() for future in turns[0].futures):
            turn = turns[0]
            failed = next((exc for future in turn.futures if (exc := future.exception()) is not None), None)
            if failed is not None:
                turn.written, turn.futures = False, []
                for later in turns:
                    later.written, later.futures = False, []
                self._failed(str(failed))
                return
            turns.popleft()
            for answers, item in turn.items:
                try:
                    answers.let_out(item)
                except Exception as exc:  # noqa: BLE001 - what ends one connection keeps nobody else's answers
                    answers.give_up(exc)
        if self._paused and self.held_bytes <= MOST_HELD // 2:
            paused, self._paused = self._paused, set()
            for reader in paused:
                reader.go_on_reading()

    def _failed(self, reason: str, fault: Exception | None = None) -> None:
        """Cut off who published what is not kept; everything else waits until it is."""
        if _kind(self.trouble) != _kind(reason):  # a try that fails in another file is no news
            _log.error("not written, so not acknowledged: %s", reason, exc_info=fault)
            self._note_trouble(reason)
        for turn in self._turns:
            if not turn.written:
                for answers, item in turn.items:
                    if isinstance(item, _PublishAck):
                        answers.cut()
        if not self._retrying:
            self._retrying = True
            self._loop.call_later(RETRY_SECONDS, self._retry)

    def close(self) -> None:
        """Let nothing out any more: what still waits is not kept."""
        self._closed = True

    def _note_trouble(self, reason: str) -> None:
        self.trouble = reason
        self.tell_trouble()

    def tell_trouble(self) -> None:
        """Have those who watch look again: trouble came or went, here or at a step."""
        if self.on_trouble is not None:
            self._loop.call_soon(self.on_trouble)

    def _retry(self) -> None:
        self._retrying = False
        if self.trouble:
            self.end_turn()


def _kind(reason: str) -> str:
    """Return what went wrong without the file it went wrong with.

    >>> _kind("[Errno 28] No space left on device: 'journal/00000000000000000001.turns'")
    '[Errno 28] No space left on device'
    """
    return reason.partition(": '")[0]
