"""A client of channel servers, ours and the original: asyncio, with reconnect and resume."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Final, Literal, Self

from penstock.channels.ids import ChannelId, is_handler
from penstock.channels.rules import RECOVERABLE
from penstock.channels.wire.arguments import as_bytes, as_member, check_settings, tls_context
from penstock.channels.wire.cutter import MessageRun
from penstock.channels.wire.dialogue import Dialogue
from penstock.channels.wire.frames import Frame
from penstock.channels.wire.news import Gap, Heard, HeardEvent, News, message_of, messages_of, news_of
from penstock.errors import ClosedError, NotConnected, OptionsError, PenstockError, Refused, Timeout
from penstock.net import Target, dial

__all__ = ["Client"]

_log = logging.getLogger(__name__)

INBOX: Final = 8192
"""Messages that wait to be taken before the client stops reading: then the server waits, or lets it go.  While nobody
has begun to take any, the oldest are forgotten instead."""
BACKOFF: Final = (0.05, 5.0)
PORTS: Final = {"tls": 22_622, "plain": 22_623}
NO_USE: Final = frozenset({"UNAUTHORIZED", "BAD_REQUEST", "UNEXPECTED_MESSAGE", "UNSUPPORTED_PROTOCOL_VERSION"})
"""What a server says to a login that will not be let in the next time either."""


class Client:
    """A member's connection to a channel server.

    ``address`` is ``host:port`` or ``tls://…`` (TLS, verified by the machine's CAs or by ``ca``), ``plain://host:port``
    or ``unix:PATH``.  Give a ``username`` where the server takes names, a ``token`` where it authenticates.

    A connection that is lost is made again, and channels go on where they were: each message is heard once and in
    order, or the Gap is told.  A request that was under way when it was lost raises NotConnected: nobody knows whether
    it was done.

    >>> import tempfile
    >>> from penstock.channels.wire import ChannelServer
    >>> async def demo(folder):
    ...     async with ChannelServer(folder, port=None, plain_port=0) as server:
    ...         address = "plain://" + server.addresses["channels-plain"]
    ...         async with await Client.connect(address, username="ann") as ann:
    ...             async with await Client.connect(address, username="bob") as bob:
    ...                 await ann.join("ops"); await bob.join("ops")
    ...                 await ann.broadcast("ops", b"pump 7 is on")
    ...                 async for message in bob.messages():
    ...                     return message.sender, message.payload
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(demo(folder))
    ('ann@localhost', b'pump 7 is on')
    """

    def __init__(
        self,
        address: str,
        *,
        username: str | None = None,
        token: str | None = None,
        ca: str | None = None,
        verify: bool = True,
        heartbeat_seconds: float = 60.0,
        reconnect: bool = True,
        timeout: float = 30.0,
    ) -> None:
        if (username is None) == (token is None):
            raise OptionsError("a client gives a username or a token")
        self.address, self.nid = address, ""
        self.server: dict[str, Any] = {}
        """What the server said of itself: its limits."""
        self.seen: dict[str, int] = {}
        """The last number heard on each channel; set it before ``connect`` to go on where another client was."""
        self._username, self._token, self._ca, self._verify = username, token, ca, verify
        self._heartbeat_ms, self._reconnect, self._timeout = round(heartbeat_seconds * 1000), reconnect, timeout
        self._domain = "localhost"
        self._dialogue: Dialogue | None = None
        self._up = asyncio.Event()
        self._inbox: deque[News | MessageRun] = deque()
        self._size = 0
        self._begun: Iterator[Heard] = iter(())
        self._own: deque[tuple[str, int, int]] = deque(maxlen=1024)
        self._news = asyncio.Event()
        self._closed: str | None = None
        self._again: asyncio.Task[None] | None = None
        self._held_back = self._has_listener = self._forgets = False
        self._forgotten: dict[str, tuple[int, int | None]] = {}  # channel → what nobody took, first and last
        self._returning: dict[str, list[MessageRun | Frame]] = {}  # said on channels that are only being joined again

    @classmethod
    async def connect(cls, address: str, **options: Any) -> Client:
        """Return a client that is logged in."""
        client = cls(address, **options)
        await client.open()
        return client

    async def open(self) -> None:
        """Connect and log in; Refused or NotConnected if that cannot be done."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._begin()
        except TimeoutError:
            raise NotConnected(f"{self.address}: no answer within {self._timeout:g} s") from None

    async def close(self) -> None:
        """End the connection; returns when it is gone, which takes the linger time of ``net`` at the most."""
        self._closed = self._closed or "the client is closed"
        self._up.set()
        self._news.set()
        if self._again is not None:
            self._again.cancel()
            await asyncio.wait([self._again])
        if self._dialogue is not None:
            self._dialogue._connection.close("closed here")
            await self._dialogue.gone.wait()
        self._news.set()

    @property
    def closed_reason(self) -> str | None:
        """Why it is closed for good, by its user or because the server lets it in no more; None while it is not."""
        return self._closed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- Members

    async def join(self, channel: str, *, on_behalf: str | None = None) -> None:
        """Become a member; who comes first creates the channel and owns it."""
        await self._ask("JOIN", channel=self._name(channel), on_behalf=as_member(on_behalf))

    async def leave(self, channel: str, *, on_behalf: str | None = None) -> None:
        """Stop being a member."""
        await self._ask("LEAVE", channel=self._name(channel), on_behalf=as_member(on_behalf))
        if on_behalf is None:
            self.seen.pop(self._name(channel), None)

    async def delete(self, channel: str) -> None:
        """End the channel with everything it holds."""
        await self._ask("DELETE", channel=self._name(channel))
        self.seen.pop(self._name(channel), None)

    async def members(self, channel: str) -> list[str]:
        """Return all members."""
        return await self._pages("MEMBERS", "members", 100, channel=self._name(channel))

    async def channels(self, *, owner: bool = False) -> list[str]:
        """Return the channels this member is in, or owns."""
        return await self._pages("CHANNELS", "channels", 50, owner=owner)

    # --- Rules

    async def configure(self, channel: str, **settings: Any) -> None:
        """Change settings by their names: persist, type, message_flush_interval, max_clients, …."""
        check_settings(settings)
        await self._ask("SET_CHAN_CONFIG", channel=self._name(channel), **settings)

    async def config(self, channel: str) -> dict[str, Any]:
        """Return the settings."""
        fields = (await self._ask("GET_CHAN_CONFIG", channel=self._name(channel))).fields
        return {name: value for name, value in fields.items() if name not in ("id", "channel")}

    async def allow(self, channel: str, kind: Literal["join", "publish", "read"], who: Iterable[str]) -> None:
        """Put names or whole domains on an allow-list."""
        await self._ask(
            "SET_CHAN_ACL", channel=self._name(channel), action="add", type=kind, nids=list(map(as_member, who))
        )

    async def disallow(self, channel: str, kind: Literal["join", "publish", "read"], who: Iterable[str]) -> None:
        """Take names or whole domains off an allow-list."""
        await self._ask(
            "SET_CHAN_ACL", channel=self._name(channel), action="remove", type=kind, nids=list(map(as_member, who))
        )

    async def allowed(self, channel: str, kind: Literal["join", "publish", "read"]) -> list[str]:
        """Return an allow-list."""
        fields = (await self._ask("GET_CHAN_ACL", channel=self._name(channel), type=kind)).fields
        return list(fields["nids"])

    # --- Messages

    async def broadcast(self, channel: str, payload: bytes, *, qos: int = 1) -> int:
        """Give a message to all members and return its number."""
        name = self._name(channel)
        seq: int = (await self._ask("BROADCAST", payload, channel=name, qos=qos)).fields["seq"]
        self._said(name, seq, seq)
        return seq

    async def broadcast_many(self, channel: str, payloads: Iterable[bytes], *, qos: int = 1) -> list[int]:
        """Give many messages, as many at a time as the server allows, and return their numbers."""
        name, given, numbers = self._name(channel), tuple(map(as_bytes, payloads)), []
        most = max(1, int(self.server.get("max_inflight_requests") or 100))
        for start in range(0, len(given), most):
            dialogue = await self._connected()
            async with self._patience("BROADCAST"):
                found = await dialogue.broadcast_run(name, given[start : start + most], qos)
            self._said(name, found[0], found[-1])
            numbers += found
        return numbers

    def _said(self, channel: str, first: int, last: int) -> None:
        """Note numbers of our own: if nothing is missing before them, all up to them is known here."""
        before = self.seen.get(channel)
        if before is not None and first - 1 <= before < last:
            self.seen[channel] = last
        if self._own and self._own[-1][0] == channel and self._own[-1][2] == first - 1:
            first = self._own.pop()[1]  # they may come back in a row
        self._own.append((channel, first, last))

    async def history(self, channel: str, from_seq: int = 1, limit: int = 100) -> list[Heard]:
        """Return stored messages from a number on, oldest first."""
        dialogue = await self._connected()
        async with self._patience("HISTORY"):
            return [message_of(frame) for frame in await dialogue.history(self._name(channel), from_seq, limit)]

    async def range(self, channel: str) -> tuple[int, int]:
        """Return the first and the last stored number; (0, 0) when nothing is stored."""
        fields = (await self._ask("CHAN_SEQ", channel=self._name(channel))).fields
        return fields["first_seq"], fields["last_seq"]

    async def direct(self, payload: bytes) -> None:
        """Hand a payload to the server's modulator."""
        await self._ask("MOD_DIRECT", payload, **{"from": self.nid})

    # --- Queues

    async def push(self, channel: str, payload: bytes) -> None:
        """Put an element at the end of a queue."""
        await self._ask("PUSH", payload, channel=self._name(channel))

    async def pop(self, channel: str) -> bytes:
        """Take the element at the head of a queue; Refused with QUEUE_EMPTY when there is none."""
        return (await self._ask("POP", channel=self._name(channel))).payload or b""

    async def length(self, channel: str) -> int:
        """Return how many elements wait."""
        count: int = (await self._ask("GET_CHAN_LEN", channel=self._name(channel))).fields["count"]
        return count

    async def clear(self, channel: str) -> None:
        """Forget all elements."""
        await self._ask("CLEAR", channel=self._name(channel))

    # --- What is heard

    async def news(self) -> AsyncIterator[News]:
        """Yield messages, events, direct payloads and gaps as they come, until the client is closed.

        Who has begun goes on taking them: when thousands wait, the client reads nothing more, answers included.
        """
        self._has_listener = True
        while self._forgotten:
            channel = next(iter(self._forgotten))
            yield Gap(channel, *self._forgotten.pop(channel))
        while True:
            message = next(self._begun, None)  # of a run; the next iteration, or another one, goes on where one left
            if message is not None:
                yield message
            elif self._inbox:
                item = self._inbox.popleft()
                if isinstance(item, MessageRun):
                    self._size -= len(item.payloads)
                    self._begun = messages_of(item)
                else:
                    self._size -= 1
                self._go_on_reading()
                if not isinstance(item, MessageRun):
                    yield item
            elif self._closed is not None:
                return
            else:
                self._news.clear()
                await self._news.wait()

    async def messages(self) -> AsyncIterator[Heard]:
        """Yield messages alone; a Gap in them raises nothing, and is logged."""
        async for item in self.news():
            if isinstance(item, Heard):
                yield item
            elif isinstance(item, Gap):
                _log.warning("%s: messages from %d on were missed for good", item.channel, item.first_seq)

    def _hear(self, item: MessageRun | Frame) -> None:
        found: MessageRun | News | None
        if isinstance(item, MessageRun) or item.name == "MESSAGE":
            aside = self._returning.get(item.channel if isinstance(item, MessageRun) else item.fields["channel"])
            if aside is not None:
                aside.append(item)
                return
            found = self._fresh(item)
        elif item.name in ("JOIN_ACK", "RESUME_ACK"):
            self._located(item)
            return
        else:
            self._heard_event(item)
            found = news_of(item)
        if found is None:
            return
        self._inbox.append(found)
        self._size += len(found.payloads) if isinstance(found, MessageRun) else 1
        self._news.set()
        if self._size > INBOX and not self._has_listener:
            self._forget_oldest()
        elif self._size > INBOX and not self._held_back and self._dialogue is not None:
            self._held_back = True
            self._dialogue.pause()

    def _forget_oldest(self) -> None:
        """Make room in an inbox that nobody takes anything from."""
        if not self._forgets:
            self._forgets = True
            _log.warning("%s: nobody takes what channels say, and the oldest of it is forgotten", self.address)
        while self._size > INBOX:
            item = self._inbox.popleft()
            self._size -= len(item.payloads) if isinstance(item, MessageRun) else 1
            last: int | None
            if isinstance(item, MessageRun):
                first, last = item.first_seq, item.first_seq + len(item.payloads) - 1
            elif isinstance(item, Heard):
                first = last = item.seq
            elif isinstance(item, Gap):
                first, last = item.first_seq, item.last_seq
            else:
                continue
            before = self._forgotten.get(item.channel)
            if before is not None:
                began_again = last is None or before[1] is None or last < before[1]
                first, last = min(first, before[0]), None if began_again else last
            self._forgotten[item.channel] = first, last

    def _go_on_reading(self) -> None:
        if self._held_back and self._size < INBOX // 2 and self._dialogue is not None:
            self._held_back = False
            self._dialogue.go_on()

    def _fresh(self, item: MessageRun | Frame) -> MessageRun | Heard | None:
        """Return what was not heard before, and is not this client's own."""
        if isinstance(item, MessageRun):
            channel, first, last, sender = (
                item.channel, item.first_seq, item.first_seq + len(item.payloads) - 1, item.sender,
            )  # fmt: skip
        else:
            channel, sender = item.fields["channel"], item.fields["from"]
            first = last = item.fields["seq"]
        before = self.seen.get(channel, 0)
        self.seen[channel] = max(before, last)
        if last <= before or (sender == self.nid and self._is_own(channel, first, last)):
            return None
        if isinstance(item, Frame):
            return message_of(item)
        if first > before:
            return item
        skip = before + 1 - first
        return MessageRun(channel, sender, before + 1, item.timestamp, item.payloads[skip:])

    def _located(self, frame: Frame) -> None:
        """Learn where a channel is, in front of what it says from now on."""
        f = frame.fields
        channel, before = f["channel"], self.seen.get(f["channel"])
        if frame.name == "JOIN_ACK":
            if f["last_seq"] is not None and channel not in self._returning:
                self.seen[channel] = f["last_seq"]
            return
        if channel in self._returning:
            self._returning.pop(channel)  # the log has it too
        if before is not None and not f["recovered"]:
            began_again = f["first_seq"] <= before
            self._tell(Gap(channel, before + 1, None if began_again else f["first_seq"] - 1))
        if before is None or not f["recovered"]:
            self.seen[channel] = f["first_seq"] - 1

    def _heard_event(self, frame: Frame) -> None:
        """Learn from an event whether this client is in a channel."""
        f = frame.fields
        if frame.name != "EVENT":
            return
        if f["kind"] == "CHANNEL_DELETED" or (f["kind"] == "MEMBER_LEFT" and f["nid"] == self.nid):
            self.seen.pop(f["channel"], None)
        elif f["kind"] == "MEMBER_JOINED" and f["nid"] == self.nid and f["last_seq"] is not None:
            self.seen.setdefault(f["channel"], f["last_seq"])

    def _is_own(self, channel: str, first: int, last: int) -> bool:
        return any(name == channel and low <= first and last <= high for name, low, high in self._own)

    # --- Connecting

    async def _begin(self) -> None:
        self._check_open()
        target = self._target()
        dialogue = Dialogue(str(target), self._hear, self._lost)
        await dial(target, dialogue, tls=self._context() if target.tls else None)
        try:
            answer = await dialogue.shake_hands(
                "CONNECT", heartbeat_interval=self._heartbeat_ms, version=1, resume=True
            )
            self.server = {name: value for name, value in answer.fields.items() if value is not None}
            dialogue.set_limits(answer.fields)
            if answer.fields["auth_required"] != (self._token is not None):
                wants = "a token" if answer.fields["auth_required"] else "a username"
                raise OptionsError(f"{self.address} takes {wants}")
            if self._token is not None:
                login = await dialogue.shake_hands("AUTH", token=self._token)
                if not login.fields["succeeded"]:
                    raise Refused("UNAUTHORIZED", login.fields["challenge"] or "the token was not accepted")
            else:
                login = await dialogue.shake_hands("IDENTIFY", username=self._username)
            if not login.fields["nid"]:
                raise NotConnected(f"{target}: the server let in nobody")
            self.nid = login.fields["nid"]
            self._domain = self.nid.rpartition("@")[2]
            self.seen = {self._name(channel): last for channel, last in self.seen.items()}
            self._dialogue, self._held_back = dialogue, False
            self._returning.clear()
            if answer.fields["resume"]:
                await self._resume(dialogue)
            else:
                await self._rejoin(dialogue, list(self.seen), resumes=False)
            self._check_open()
            if self._dialogue is not dialogue:
                raise NotConnected(f"{target}: {dialogue.closed_reason}")
        except BaseException:
            if self._dialogue is dialogue:
                self._dialogue = None
            dialogue._connection.abort("given up")
            raise
        self._up.set()

    async def _resume(self, dialogue: Dialogue) -> None:
        """Go on with every channel where it was; the server says nothing of a channel before."""
        joined: list[str] = []
        page = 1
        while True:
            found = (await dialogue.ask("CHANNELS", owner=False, page=page, page_size=50)).fields
            joined += found["channels"] or ()
            if not found["channels"] or len(joined) >= (found["total_count"] or 0):
                break
            page += 1
        known = set(self.seen)

        async def go_on(channel: str) -> None:
            if await self._replayed(dialogue, channel) == "PERSISTENCE_NOT_ENABLED" and channel in known:
                self._tell(Gap(channel, self.seen[channel] + 1, None))

        await asyncio.gather(*map(go_on, joined))
        await self._rejoin(dialogue, [channel for channel in known if channel not in joined], resumes=True)

    async def _replayed(self, dialogue: Dialogue, channel: str) -> str:
        """Ask for what was missed; return why there is nothing, or nothing."""
        last = self.seen.get(channel)
        try:
            await dialogue.ask("RESUME", channel=channel, from_seq=0 if last is None else last + 1)
        except Refused as exc:
            if exc.reason not in RECOVERABLE:
                raise
            return exc.reason
        return ""

    async def _rejoin(self, dialogue: Dialogue, channels: list[str], *, resumes: bool) -> None:
        """Join again what was left when the connection was lost: what was said meanwhile is kept, or gone."""
        await asyncio.gather(*(self._rejoin_one(dialogue, channel, resumes=resumes) for channel in channels))

    async def _rejoin_one(self, dialogue: Dialogue, channel: str, *, resumes: bool) -> None:
        last = self.seen[channel]
        number: int | None = None
        aside: list[MessageRun | Frame] = []
        self._returning[channel] = aside
        try:
            number = (await dialogue.ask("JOIN", channel=channel)).fields["last_seq"]
        except Refused as exc:
            if exc.reason != "USER_IN_CHANNEL":
                _log.warning("%s could not be joined again: %s", channel, exc)
                del self.seen[channel], self._returning[channel]
                self._tell(HeardEvent("MEMBER_LEFT", channel, self.nid, None))
                return
        if resumes and not await self._replayed(dialogue, channel):
            return
        # What was said meanwhile is gone.  How much that is can be told unless the numbers began again.
        if number is None or number != last:
            self._tell(Gap(channel, last + 1, number if number is not None and number > last else None))
        self.seen[channel] = number or 0
        self._returning.pop(channel, None)
        for item in aside:
            self._hear(item)

    def _tell(self, item: News) -> None:
        self._inbox.append(item)
        self._size += 1
        self._news.set()

    def _lost(self, dialogue: Dialogue, reason: str) -> None:
        if dialogue is not self._dialogue:
            return
        self._dialogue = None
        if self._closed is None and not self._up.is_set():
            return  # it was only being made: whoever makes it is told by an error, and goes on
        self._up.clear()
        if self._closed is not None or not self._reconnect:
            self._closed = self._closed or reason
            self._up.set()
            self._news.set()
            return
        self._again = asyncio.get_running_loop().create_task(self._come_back(reason))

    async def _come_back(self, reason: str) -> None:
        _log.info("%s: connection lost (%s), connecting again", self.address, reason)
        pause, longest = BACKOFF
        while self._closed is None:
            try:
                async with asyncio.timeout(self._timeout):
                    await self._begin()
                return
            except (OptionsError, Refused) as exc:
                if not isinstance(exc, Refused) or exc.reason in NO_USE:
                    self._closed = str(exc)
                    self._up.set()
                    self._news.set()
                    return
                _log.debug("%s: not yet: %s", self.address, exc)
            except (PenstockError, OSError, TimeoutError) as exc:
                _log.debug("%s: not yet: %s", self.address, exc)
            except Exception:  # noqa: BLE001 - who waits for the connection would wait for ever
                _log.exception("%s: not yet, because of a fault", self.address)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, longest)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ClosedError(f"{self.address}: {self._closed}")

    async def _connected(self) -> Dialogue:
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    await self._up.wait()
                    self._check_open()
                    if self._dialogue is not None:
                        return self._dialogue
                    self._up.clear()
        except TimeoutError:
            raise NotConnected(f"{self.address}: no connection within {self._timeout:g} s") from None

    async def _ask(self, name: str, payload: bytes | None = None, **fields: Any) -> Frame:
        dialogue = await self._connected()
        async with self._patience(name):
            answer = await dialogue.ask(name, payload, **fields)
        if name == "JOIN" and fields.get("on_behalf") is None:
            self.seen.setdefault(fields["channel"], 0)  # a server that does not say where the channel is
        return answer

    @contextlib.asynccontextmanager
    async def _patience(self, name: str) -> AsyncIterator[None]:
        """Wait for an answer as long as this client waits, and say what for."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError:
            why = f": {self._size} messages wait to be taken, see news()" if self._held_back else ""
            raise Timeout(f"{self.address}: no answer to {name} within {self._timeout:g} s{why}") from None

    async def _pages(self, name: str, field: str, size: int, **fields: Any) -> list[str]:
        found: list[str] = []
        page = 1
        while True:
            answer = (await self._ask(name, page=page, page_size=size, **fields)).fields
            found += answer[field] or ()
            if not answer[field] or len(found) >= (answer["total_count"] or 0):
                return found
            page += 1

    def _name(self, channel: str) -> str:
        if channel.startswith("!"):
            return str(ChannelId.parse(channel))
        if not is_handler(channel):
            raise OptionsError(f"invalid channel handler: {channel[:80]!r}")
        return f"!{channel}@{self._domain}"

    def _target(self) -> Target:
        text = self.address if "://" in self.address or self.address.startswith("unix:") else f"tls://{self.address}"
        return Target.parse(text, PORTS)

    def _context(self) -> ssl.SSLContext:
        try:
            return tls_context(self._ca, verify=self._verify)
        except OptionsError as exc:
            if self.server:  # it was good when this client began, and is perhaps just being replaced
                raise NotConnected(str(exc)) from exc
            raise
