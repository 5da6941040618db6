"""Resume without holes: replay what a client missed on a channel, then go on live, in order and each message once.

    client                          server
    RESUME id=4 channel=!ops@x from_seq=7
                                    RESUME_ACK id=4 channel=!ops@x first_seq=7 last_seq=9 recovered=true
                                    MESSAGE … seq=7 … seq=8 … seq=9 …      from the log
                                    MESSAGE … seq=10 …                     live

What retention takes while the log is read is told by another RESUME_ACK in front of what comes next.
While the log is read, what the channel says is held here, as far as it fits; the log has it as well.  When what was
read reaches what is held, the rest is told from memory and the channel is live, in one turn of the loop.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.channels import commands as c
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.wire.frames import Frame, encode_frame
from penstock.errors import OptionsError, Refused

if TYPE_CHECKING:
    from penstock.channels.manager import ChannelManager
    from penstock.channels.wire.hearing import Hearing

__all__ = ["Replay"]

HELD: Final = 4096
"""Messages held while the log is read; more are read from the log again."""
HELD_BYTES: Final = 8 << 20
"""Bytes of payloads held."""
MEMBERS_ONLY: Final = frozenset({"NOT_ALLOWED", "PERSISTENCE_NOT_ENABLED"})
"""Refusals that only a member of a channel gets, who may hear it all the same, now or later."""
PIECE: Final = 256
"""Messages read from the log at a time."""


class Replay:
    """What one client hears of one channel: nothing yet, the log, or all that is said."""

    def __init__(
        self,
        hearing: Hearing,
        manager: ChannelManager,
        frame: Frame | None,
        channel: ChannelId,
        *,
        live: bool = False,
        joining: bool = False,
    ) -> None:
        self.live, self.joining = live, joining
        self._hearing, self._manager, self._frame, self._channel = hearing, manager, frame, channel
        self._held: deque[c.Messages] = deque()
        self._size = self._bytes = 0
        self._own: list[range] = []
        self._stopped: bool = False
        self._has_log = False

    def stop(self) -> None:
        """Read no more: the client has gone, or asks again."""
        self._stopped = True
        self._held.clear()

    def hold(self, run: c.Messages) -> None:
        """Keep what is said while the log is read; the oldest goes when it is too much.

        Nothing goes until it is known that there is a log.  What is said until then had waited for the same channel,
        in memory.
        """
        self._held.append(run)
        self._size += len(run)
        self._bytes += sum(map(len, run.payloads))
        while self._has_log and (self._size > HELD or self._bytes > HELD_BYTES):
            gone = self._held.popleft()
            self._size -= len(gone)
            self._bytes -= sum(map(len, gone.payloads))

    def own(self, numbers: range) -> None:
        """Note numbers of messages that this very client sent: it is not told of them."""
        if not self.live:
            self._own.append(numbers)

    def joined(self) -> None:
        """Go live: the client is a member now, and was told so."""
        self.joining = False
        self._go_live(0)

    async def begin(self) -> int | None:
        """Answer, and return the number to replay from; None when there is nothing to replay."""
        link, nid = self._hearing.link, self._hearing.link.nid
        assert nid is not None
        assert self._frame is not None
        wanted = self._frame.fields["from_seq"]
        try:
            first, last, spent = await self._manager.submit(c.Range(self._channel, nid, for_resume=True))
        except Refused as exc:
            link.refused(exc, self._frame.id)
            if exc.reason not in MEMBERS_ONLY:
                self._hearing.forget(self._channel, self)
            elif not self._stopped:  # a channel without history is heard from now on
                self._go_live(0)
            return None
        except Exception:  # noqa: BLE001 - the log of this channel cannot be read
            link.fail("INTERNAL_SERVER_ERROR", None, self._frame.id)
            return None
        self._has_log = True
        begin, recovered = where_to_begin(wanted, first or spent + 1, spent + 1)
        if link.ended is None:
            self._acknowledge(begin, last or spent, recovered=recovered)
        return None if self._stopped else begin

    def _acknowledge(self, first: int, last: int, *, recovered: bool) -> None:
        assert self._frame is not None
        answer = {
            "id": self._frame.id,
            "channel": self._frame.fields["channel"],
            "first_seq": first,
            "last_seq": last,
            "recovered": recovered,
        }
        self._hearing.link.send(encode_frame("RESUME_ACK", answer))

    async def run(self, begin: int) -> None:
        """Replay from a number on, then go live."""
        link, nid = self._hearing.link, self._hearing.link.nid
        assert nid is not None
        while not self._is_over():
            if self._held and self._held[0].first_seq <= begin:
                self._go_live(begin)
                return
            try:
                entries = await self._manager.submit(c.History(self._channel, nid, begin, PIECE, for_resume=True))
                if entries and entries[0].seq > begin:
                    first, last, _ = await self._manager.submit(c.Range(self._channel, nid, for_resume=True))
                    if self._held:
                        first = min(first, self._held[0].first_seq)
                    if first > begin and not self._is_over():
                        self._acknowledge(first, last, recovered=False)
                        begin = first
                        continue
            except Refused as exc:  # it may not read any more, or nothing is kept any more
                self.live = True
                if not self._is_over():  # who is out, or whose channel was deleted, was told so by an event
                    link.refused(exc, None)
                return
            except Exception:  # noqa: BLE001
                if not self._is_over():
                    link.fail("INTERNAL_SERVER_ERROR")
                return
            if self._is_over():
                return
            if not entries:  # if something is held, numbers that were spent on nothing lie between
                self._go_live(begin)
                return
            self._tell(entries)
            begin = entries[-1].seq + 1
            self._hearing.flush()
            await self._hearing.caught_up()

    def _is_over(self) -> bool:
        return self._stopped

    def _go_live(self, begin: int) -> None:
        """Tell what was held from a number on, and hear the rest as it comes."""
        for run in self._held:
            skip = max(0, begin - run.first_seq)
            if skip < len(run):
                payloads = run.payloads[skip:]
                part = c.Messages(run.channel, run.sender, run.first_seq + skip, run.timestamp, payloads)
                self._hearing.link.deliver(run if not skip else part)
        self._held.clear()
        self._own.clear()
        self.live = True

    def _tell(self, entries: list[c.StoredMessage]) -> None:
        """Tell stored messages as if they were said now, but not those this client sent itself."""
        for entry in entries:
            if any(entry.seq in numbers for numbers in self._own):
                continue
            try:
                sender = Nid.parse(entry.sender)
            except OptionsError:
                sender = Nid("", entry.sender)  # a log of another day may hold any sender
            self._hearing.link.deliver(c.Messages(self._channel, sender, entry.seq, entry.timestamp, (entry.payload,)))


def where_to_begin(wanted: int, first: int, following: int) -> tuple[int, bool]:
    """Return the number to go on with, and whether nothing was lost before it.

    ``first`` is the oldest number that is kept, ``following`` the next one that will be given out.  A client that has
    seen more than that knew another channel of this name: it is told all there is.

    >>> where_to_begin(0, 3, 10), where_to_begin(4, 3, 10), where_to_begin(1, 3, 10), where_to_begin(99, 3, 10)
    ((10, True), (4, True), (3, False), (3, False))
    """
    if not wanted:
        return following, True
    if wanted < first or wanted > following:
        return first, False
    return wanted, True
