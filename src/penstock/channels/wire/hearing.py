"""What one client hears: what its channels say, what it is replayed of them, and payloads for it alone.

A client that has just logged in is told nothing for a moment.  One that knows RESUME hears a channel from the moment it
joined, was let in, or asked for it, and until it is out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.channels import commands as c
from penstock.channels.ids import ChannelId
from penstock.channels.wire.frames import Frame, encode_frame
from penstock.channels.wire.link import ClientLink, LinkState
from penstock.channels.wire.requests import channel_of
from penstock.channels.wire.resume import Replay

if TYPE_CHECKING:
    from penstock.channels.wire.server import ChannelServer

__all__ = ["Hearing"]

QUIET_SECONDS: Final = 0.05
"""How long a client that just logged in is told nothing unless it asks: the original's client drops what it reads
together with the answer to its login."""


class Hearing:
    """What one client hears.  ``hear`` is its sink at the manager; ``flush`` writes what the link has to say."""

    def __init__(
        self,
        link: ClientLink,
        server: ChannelServer,
        flush: Callable[[], None],
        caught_up: Callable[[], Awaitable[Any]],
    ) -> None:
        self.link, self.flush, self.caught_up = link, flush, caught_up
        self._server = server
        self._held: list[c.Delivery | bytes] | None = None
        self._replays: dict[ChannelId, Replay] = {}

    # --- After a login

    def wait_a_moment(self) -> None:
        """Hold back what is said: the client is being told that it is in."""
        self._held = []
        asyncio.get_running_loop().call_later(QUIET_SECONDS, self.begin)

    def begin(self) -> None:
        """Tell what was held back: the client asks, or the moment is over."""
        if self._held is None:
            return
        held, self._held = self._held, None
        for event in held:
            if isinstance(event, bytes):
                self.link.send(event)
            else:
                self.link.deliver(event)
        if held:
            self.flush()

    def end(self) -> None:
        """Replay nothing more: the client has gone."""
        for replay in self._replays.values():
            replay.stop()

    # --- What is said

    def hear(self, event: c.Delivery) -> None:
        """Take what the channels say; the manager calls this."""
        try:
            self._tell(event)
        except Exception:  # the manager says nothing more to a sink that failed
            self.link.fail("INTERNAL_SERVER_ERROR")
            self.flush()
            raise

    def direct(self, payload: bytes) -> None:
        """Tell the client what a modulator sends it alone."""
        if self.link.state is LinkState.READY:
            data = encode_frame("MOD_DIRECT", {"from": self._server.options.domain}, payload)
            if self._held is not None:
                self._held.append(data)
            else:
                self.link.send(data)
                self.flush()

    def _tell(self, event: c.Delivery) -> None:
        """Tell the client what its channels say, now or when its turn comes."""
        if self.link.resumes:
            replay = self._replays.get(event.channel)
            if isinstance(event, c.Event):
                if self._is_out_now(event):
                    self.leave(event.channel)
                elif replay is None and self._is_in_now(event):
                    self._replays[event.channel] = self._replay(None, event.channel, live=True)
            elif replay is None:
                return  # nothing is lost: the client asks for it with RESUME
            elif not replay.live:
                replay.hold(event)
                return
        if self._held is not None:
            self._held.append(event)
        else:
            self.link.deliver(event)
            self.flush()

    def _is_out_now(self, event: c.Event) -> bool:
        return event.kind == "CHANNEL_DELETED" or (event.kind == "MEMBER_LEFT" and event.nid == self.link.nid)

    def _is_in_now(self, event: c.Event) -> bool:
        """Whether an event says that another connection let this client into a channel; it can have missed nothing."""
        return event.kind == "MEMBER_JOINED" and event.nid == self.link.nid and (not event.owner or event.last_seq == 0)

    # --- Channels it resumes, joins and leaves

    def joining(self, frame: Frame, channel: ChannelId) -> None:
        """Hold what a channel says until the client is told that it has joined."""
        if channel not in self._replays:
            self._replays[channel] = self._replay(frame, channel, joining=True)

    def not_joined(self, frame: Frame) -> None:
        """Forget a channel that the client did not get into."""
        if not self._replays:
            return
        channel = channel_of(frame.fields["channel"])
        replay = self._replays.get(channel)
        if replay is not None and replay.joining:
            del self._replays[channel]

    def note(self, frame: Frame, channel: ChannelId, answer: Any) -> None:
        """Let a channel that was just joined be heard at once, and do not replay a client's own messages to it."""
        replay = self._replays.get(channel)
        if frame.name == "DELETE":
            self.leave(channel)
        elif frame.name == "BROADCAST":
            self.own(channel, range(answer, answer + 1))
        elif frame.name == "LEAVE":
            if frame.fields["on_behalf"] == str(self.link.nid):  # only an owner may, so that is known only now
                self.leave(channel)
        elif frame.fields["on_behalf"] is None:
            if replay is None:
                self._replays[channel] = self._replay(frame, channel, live=True)
            elif replay.joining:
                replay.joined()

    def own(self, channel: ChannelId, numbers: range) -> None:
        """Note numbers of messages that this very client sent."""
        replay = self._replays.get(channel)
        if replay is not None:
            replay.own(numbers)

    def resume(self, frame: Frame, channel: ChannelId) -> Replay:
        """Return a replay of a channel, in the place of one that is under way."""
        before = self._replays.get(channel)
        if before is not None:
            before.stop()
        replay = self._replays[channel] = self._replay(frame, channel)
        return replay

    def leave(self, channel: ChannelId) -> None:
        """Forget what a client heard of a channel: it is no member any more."""
        replay = self._replays.pop(channel, None)
        if replay is not None:
            replay.stop()

    def forget(self, channel: ChannelId, replay: Replay) -> None:
        """Forget a replay that was refused, unless another is in its place."""
        if self._replays.get(channel) is replay:
            del self._replays[channel]

    def _replay(self, frame: Frame | None, channel: ChannelId, *, live: bool = False, joining: bool = False) -> Replay:
        return Replay(self, self._server.manager, frame, channel, live=live, joining=joining)
