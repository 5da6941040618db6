"""The server's side of one client: bytes in, requests out; answers in, bytes out.  No socket, clock or task in it.

    connecting ── CONNECT ──► connected ── IDENTIFY or AUTH ──► logging in ── logged_in ──► ready ──► ended
                                   ▲                                 │
                                   └──────────── try again ──────────┘

The shell loops: ``feed`` what it read, carry out each ``next_request`` and tell the answer, write ``take_output``, and
call ``tick`` when ``deadline`` has passed.  A link that ``ended`` is closed after its output was written.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from penstock.channels import commands as c
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.model import Limits
from penstock.channels.rules import RECOVERABLE
from penstock.channels.wire.cutter import BroadcastRun, Cutter, Fault, Item
from penstock.channels.wire.frames import Frame, encode_error, encode_frame
from penstock.channels.wire.requests import BadName, channel_of, command_of, encode_answer, encode_event, encode_run
from penstock.channels.wire.settings import WireSettings, connect_ack
from penstock.errors import OptionsError, Refused
from penstock.kernel import channelwire

__all__ = ["ClientLink", "LinkState", "Request", "Login", "Ask", "AskRun", "ListChannels", "Direct", "Resume"]

RATE_SECONDS: Final = 2.0
PINGS: Final = 3
"""How many intervals a client may take to answer a PING."""
OVERLOADED: Final = b'ERROR reason=SERVER_OVERLOADED detail=\\"max connections reached\\"\n'
WHITE_SPACE: Final = " \t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""What the original takes off a name: White_Space as Unicode has it, which is less than Python's."""
TOO_LARGE: Final = "response exceeded maximum message size"
EXTENSION: Final = frozenset({"RESUME", "RESUME_ACK"})
"""Messages that exist only for a client that asked for them in its CONNECT."""
STAYS_OPEN: Final = RECOVERABLE | {"RESPONSE_TOO_LARGE", "USERNAME_IN_USE"}


class LinkState(enum.Enum):
    """Where a client is in its life."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    LOGGING_IN = "logging in"
    READY = "ready"
    ENDED = "ended"


class Login(msgspec.Struct, frozen=True):
    """Find out who this is: a name it gives, or a token."""

    text: str
    is_token: bool


class Ask(msgspec.Struct, frozen=True):
    """Ask one thing of a channel."""

    frame: Frame
    command: c.Command


class AskRun(msgspec.Struct, frozen=True):
    """Broadcast a run on a channel."""

    run: BroadcastRun
    channel: ChannelId


class ListChannels(msgspec.Struct, frozen=True):
    """List the channels of the client."""

    frame: Frame


class Direct(msgspec.Struct, frozen=True):
    """Hand a payload to the modulator."""

    frame: Frame


class Resume(msgspec.Struct, frozen=True):
    """Replay what was missed on a channel, then go on live."""

    frame: Frame
    channel: ChannelId


Request = Login | Ask | AskRun | ListChannels | Direct | Resume


class ClientLink:
    r"""One client of a server.

    >>> link = ClientLink(WireSettings(), Limits(), now=0.0)
    >>> link.feed(b"CONNECT version=1\nIDENTIFY username=ann\n", 0.1)
    >>> link.next_request(0.1, 0, bool)
    Login(text='ann', is_token=False)
    >>> link.logged_in(Nid("ann", "localhost"), 0.2); link.take_output()[-1]
    b'IDENTIFY_ACK nid=ann@localhost\n'
    """

    def __init__(
        self,
        settings: WireSettings,
        limits: Limits,
        *,
        now: float,
        auth: bool = False,
        protocol: str | None = None,
        takes_direct: bool = False,
        new_ping_id: Callable[[], int] = lambda: 1,
    ) -> None:
        self.state = LinkState.CONNECTING
        self.nid: Nid | None = None
        self.in_flight = 0
        """Requests that wait for an answer; the shell counts."""
        self.ended: str | None = None
        """Why the link is over, once it is."""
        self.resumes = False
        """Whether the client knows RESUME: it hears of a channel only from then on."""
        self.silent_close = False
        self._settings, self._limits = settings, limits
        self.takes_direct = takes_direct
        """Whether a modulator takes private payloads."""
        self._auth, self._protocol = auth, protocol
        self._new_ping_id = new_ping_id
        self._cutter = Cutter(settings.max_message_size, settings.max_payload_size)
        self._items: deque[Item] = deque()
        self._out: list[bytes] = []
        self._counts: list[int] = []
        self._frames = self._size = 0
        self._heartbeat = settings.keep_alive_interval
        self._state_deadline: float | None = now + settings.connect_timeout
        self._payload_deadline: float | None = None
        self._unfinished: Frame | None = None
        self._active = False
        self._ping: int | None = None
        self._pong: int | None = None
        self._rate_since, self._rate_bytes = now, 0

    # --- Input

    def feed(self, data: bytes, now: float) -> None:
        """Take what one read brought."""
        if self.state is LinkState.ENDED:
            return
        self._items.extend(self._cutter.feed(data))
        unfinished = self._cutter.unfinished
        if unfinished is not self._unfinished:  # each payload has its own time, also when every read ends inside one
            self._unfinished = unfinished
            self._payload_deadline = None if unfinished is None else now + self._settings.payload_read_timeout

    def next_request(self, now: float, now_ms: int, is_connected: Callable[[Nid], bool]) -> Any:
        """Return the next thing to do for the client; None when there is nothing, or when a login has to end first."""
        while self._items and self.state not in (LinkState.ENDED, LinkState.LOGGING_IN):
            item = self._items.popleft()
            if isinstance(item, Fault):
                self.fail(item.reason, item.detail, item.id)
                return None
            if self._settings.rate_limit:
                rated = self._rated(item, now)
                if rated is None:
                    return None
                item = rated
            request = self._request(item, now, now_ms, is_connected)
            if request is not None:
                return request
        return None

    def _rated(self, item: Item, now: float) -> Item | None:
        """Count what arrived against the rate; None when it was too much from the first byte on."""
        limit = self._settings.rate_limit
        if now - self._rate_since >= RATE_SECONDS:
            self._rate_since, self._rate_bytes = now, 0
        sizes = item.size_list() if isinstance(item, BroadcastRun) else [item.size if isinstance(item, Frame) else 0]
        total = sum(sizes)
        if self._rate_bytes + total <= limit:
            self._rate_bytes += total
            return item
        count = 0
        for size in sizes:
            self._rate_bytes += size
            if self._rate_bytes > limit:
                break
            count += 1
        number = item.id if isinstance(item, Frame) else None
        if isinstance(item, BroadcastRun):
            number = item.id_list()[count]
        fault = Fault("POLICY_VIOLATION", "rate limit exceeded", number)
        self._items.clear()
        if isinstance(item, BroadcastRun) and count:
            self._items.append(fault)
            return item.first(count)
        self.fail(fault.reason, fault.detail, fault.id)
        return None

    def _request(self, item: Item, now: float, now_ms: int, is_connected: Callable[[Nid], bool]) -> Any:
        if isinstance(item, Frame) and item.name in EXTENSION and not self.resumes:
            self.fail("BAD_REQUEST", "unknown message")  # as to any client of the original
            return None
        if self.state is LinkState.READY:
            if isinstance(item, Frame) and item.name == "PONG":
                self._ponged(item.fields["id"], now)
                return None
            try:
                return self._ready_request(item, now_ms, is_connected)
            except BadName as exc:
                self.fail("BAD_REQUEST", str(exc))
                return None
        if isinstance(item, Frame) and self.state is LinkState.CONNECTING and item.name == "CONNECT":
            self._connect(item, now)
            return None
        if isinstance(item, Frame) and self.state is LinkState.CONNECTED:
            if item.name == "IDENTIFY" and not self._auth:
                self.state = LinkState.LOGGING_IN
                return Login(item.fields["username"].strip(WHITE_SPACE), False)
            if item.name == "AUTH" and self._auth:
                self.state = LinkState.LOGGING_IN
                return Login(item.fields["token"], True)
        self.fail("UNEXPECTED_MESSAGE")
        return None

    def _ready_request(self, item: Item, now_ms: int, is_connected: Callable[[Nid], bool]) -> Request | None:
        assert self.nid is not None
        if self.in_flight > self._settings.max_inflight_requests:
            self.silent_close = True
            self.end("more requests under way than allowed")
            return None
        self._active = True
        if isinstance(item, BroadcastRun):
            return AskRun(item, channel_of(item.channel))
        assert isinstance(item, Frame)
        if item.name == "CHANNELS":
            return ListChannels(item)
        if item.name == "RESUME":
            return Resume(item, channel_of(item.fields["channel"]))
        if item.name == "MOD_DIRECT" and self.takes_direct:
            if item.id is None:
                self.fail("BAD_REQUEST")
                return None
            return Direct(item)
        command = command_of(item, self.nid, now_ms, is_connected)
        if command is None:
            self.fail("UNEXPECTED_MESSAGE")
            return None
        return Ask(item, command)

    def _connect(self, frame: Frame, now: float) -> None:
        if frame.fields["version"] != 1:
            self.fail("UNSUPPORTED_PROTOCOL_VERSION")
            return
        fields = connect_ack(
            self._settings, self._limits, auth=self._auth, asked_ms=frame.fields["heartbeat_interval"],
            protocol=self._protocol,
        )  # fmt: skip
        self._heartbeat = self._settings.heartbeat_ms(frame.fields["heartbeat_interval"]) / 1000
        if frame.fields["resume"]:
            self.resumes = True
            fields["resume"] = True
        self.state = LinkState.CONNECTED
        self._state_deadline = now + self._settings.authenticate_timeout
        self.send(encode_frame("CONNECT_ACK", fields))

    # --- Logging in

    def logged_in(self, nid: Nid, now: float) -> None:
        """Go on: the client is who it says."""
        if self.state is not LinkState.LOGGING_IN:
            return
        self.nid, self.state = nid, LinkState.READY
        self._state_deadline = now + self._heartbeat
        if self._auth:
            self.send(encode_frame("AUTH_ACK", {"nid": str(nid), "succeeded": True}))
        else:
            self.send(encode_frame("IDENTIFY_ACK", {"nid": str(nid)}))

    def login_refused(self) -> None:
        """Let the client try again with another token."""
        self._try_again(encode_frame("AUTH_ACK", {"succeeded": False}))

    def challenged(self, challenge: str) -> None:
        """Ask the client for more."""
        self._try_again(encode_frame("AUTH_ACK", {"challenge": challenge}))

    def name_in_use(self) -> None:
        """Let the client try again with another name."""
        self._try_again(encode_frame("ERROR", {"reason": "USERNAME_IN_USE"}))

    def _try_again(self, answer: bytes) -> None:
        if self.state is LinkState.LOGGING_IN:
            self.state = LinkState.CONNECTED
            self.send(answer)

    # --- Answers

    def answered(self, frame: Frame, answer: Any) -> None:
        """Tell the client the answer to a request."""
        if self.state is LinkState.ENDED:
            return
        try:
            messages = encode_answer(frame, answer)
        except OptionsError:  # a name of another day that no line can carry
            self.fail("INTERNAL_SERVER_ERROR", None, frame.id)
            return
        if not self._fits(messages[-1]):
            messages[-1] = encode_frame("ERROR", {"id": frame.id, "detail": TOO_LARGE, "reason": "RESPONSE_TOO_LARGE"})
        if all(map(self._fits, messages)):
            self.send(b"".join(messages), len(messages))
        else:
            self.end("a message does not fit max_message_size")

    def run_answered(self, run: BroadcastRun, numbers: range) -> None:
        """Tell the client the numbers of a run: all acknowledgements in one write."""
        if self.state is not LinkState.ENDED:
            self.send(channelwire.encode_acks(run.ids, numbers.start), len(run))

    def refused(self, error: Refused, id: int | None) -> None:
        """Tell the client that the rules say no."""
        self.fail(error.reason, error.detail, id)

    def deliver(self, event: c.Delivery) -> None:
        """Tell the client an event, or a run of messages."""
        if self.state is LinkState.ENDED:
            return
        if isinstance(event, c.Messages):
            data, longest = encode_run(event)
            if longest > self._settings.max_message_size and not self._fits(data):
                self.end("a message does not fit max_message_size")
            else:
                self.send(data, len(event))
            return
        data = encode_event(event, numbered=self.resumes)
        if len(data) > self._settings.max_message_size:
            self.end("an event does not fit max_message_size")
        else:
            self.send(data)

    def _fits(self, data: bytes) -> bool:
        return data.find(b"\n", 0, self._settings.max_message_size) >= 0

    def fail(self, reason: str, detail: str | None = None, id: int | None = None) -> None:
        """Tell the client an error, and end unless it is one after which a connection stays."""
        if self.state is LinkState.ENDED:
            return
        self.send(encode_error(reason, detail, id))
        if reason not in STAYS_OPEN:
            self.end(f"{reason}: {detail}" if detail else reason)

    def end(self, why: str) -> None:
        """Go no further; the first reason counts."""
        if self.state is LinkState.ENDED:
            return
        self.state, self.ended = LinkState.ENDED, why
        self._items.clear()
        self._state_deadline = self._payload_deadline = None

    # --- Output

    def send(self, data: bytes, frames: int = 1) -> None:
        """Add to the output; ``frames`` is how many messages it holds."""
        self._out.append(data)
        self._counts.append(frames)
        self._frames += frames
        self._size += len(data)

    @property
    def has_output(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._out)

    @property
    def waiting(self) -> int:
        """How many messages wait to be written."""
        return self._frames

    def take_output(self, most: int | None = None) -> list[bytes]:
        """Return what is to be written next, of all that is about ``most`` bytes.

        What is left stays as it is, shared with the others it goes to; encrypted, it would be a copy for each.
        """
        if most is None or self._size <= most:
            out, self._out, self._counts = self._out, [], []
            self._frames = self._size = 0
            return out
        end = size = 0
        while size < most:
            size += len(self._out[end])
            end += 1
        out, self._size = self._out[:end], self._size - size
        self._frames -= sum(self._counts[:end])
        del self._out[:end], self._counts[:end]
        return out

    def overflow(self) -> None:
        """End a client that does not read: what waited for it is dropped."""
        self.take_output()
        self.fail("OUTBOUND_QUEUE_FULL")

    # --- Time

    @property
    def deadline(self) -> float | None:
        """When ``tick`` has something to do."""
        if self._state_deadline is None or self._payload_deadline is None:
            return self._state_deadline if self._payload_deadline is None else self._payload_deadline
        return min(self._state_deadline, self._payload_deadline)

    def tick(self, now: float) -> None:
        """Act on a deadline that has passed."""
        if self.state is LinkState.ENDED:
            return
        if self._payload_deadline is not None and now >= self._payload_deadline:
            self.fail("TIMEOUT", "payload read timeout")
        elif self._state_deadline is None or now < self._state_deadline:
            return
        elif self.state is LinkState.CONNECTING:
            self.fail("TIMEOUT", "connection timeout")
        elif self.state is not LinkState.READY:
            self.fail("TIMEOUT", "authentication timeout")
        elif self._ping is not None:
            self.fail("TIMEOUT", "ping timeout")
        elif self._active:
            self._active = False
            self._state_deadline = now + self._heartbeat
        elif self._pong is not None:  # one that nobody asked for cannot be the right one
            self.fail("BAD_REQUEST", "wrong pong id")
        else:
            self._ping = self._new_ping_id()
            self._state_deadline = now + PINGS * self._heartbeat
            self.send(encode_frame("PING", {"id": self._ping}))

    def _ponged(self, id: int, now: float) -> None:
        if self._ping is None:
            self._pong = id
        elif id != self._ping:
            self.fail("BAD_REQUEST", "wrong pong id")
        else:
            self._ping = None
            self._state_deadline = now + self._heartbeat
