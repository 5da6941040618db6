"""One client of the server, between its connection and the manager of the channels.

The link decides, the manager keeps, this carries between them.  A run of broadcasts is one command and one write of
acknowledgements.  What a slow client does not take is counted, and one message too many ends it; its own requests are
not read meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.channels import commands as c
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.session import ChannelSession
from penstock.channels.username import is_username
from penstock.channels.wire import counts
from penstock.channels.wire.cutter import BroadcastRun
from penstock.channels.wire.frames import Frame, encode_frame
from penstock.channels.wire.hearing import Hearing
from penstock.channels.wire.link import (
    OVERLOADED,
    Ask,
    AskRun,
    ClientLink,
    Direct,
    LinkState,
    ListChannels,
    Login,
    Request,
    Resume,
)
from penstock.channels.wire.modulator import Challenge, Moderation, ModulatorFailed
from penstock.channels.wire.requests import channel_of
from penstock.channels.wire.resume import Replay
from penstock.errors import Refused
from penstock.net import Connection

if TYPE_CHECKING:
    from penstock.channels.wire.server import ChannelServer

__all__ = ["ClientShell"]

_log = logging.getLogger(__name__)

PIECE_BYTES: Final = 256 << 10
"""What is handed to the connection at once of what waits for a client."""


class ClientShell:
    """The core of one connection, as ``net`` sees it."""

    def __init__(self, server: ChannelServer) -> None:
        self._server = server
        moderation = server.moderation
        self._moderation = moderation
        self._now = server.clock.monotonic
        self.link = ClientLink(
            server.options.wire,
            server.options.limits,
            now=self._now(),
            auth=server.authenticates,
            protocol=None if moderation is None else moderation.protocol,
            takes_direct=moderation is not None and moderation.has("direct"),
            new_ping_id=lambda: random.randrange(1, 1 << 32),
        )
        self._connection: Connection
        self.session: ChannelSession | None = None
        self._slow = False
        self._due: float | None = None
        self._under_way: dict[asyncio.Future[Any], float] = {}  # since when; infinity once it was told to be late
        self._late: asyncio.TimerHandle | None = None
        self._in_turn = asyncio.Lock()
        self._rejected = self._departed = False
        self._writable = asyncio.Event()
        self._writable.set()
        self.hearing = Hearing(self.link, server, self._flush, self._writable.wait)

    # --- What the connection says

    def opened(self, connection: Connection) -> None:
        """Let a client in, or turn it away."""
        self._connection = connection
        if not self._server.entered(self):
            self._rejected = True
            counts.REJECTED.add()
            connection.write(OVERLOADED)
            connection.close("max connections reached")
            return
        counts.ACCEPTED.add()
        counts.CONNECTIONS.add()
        self._flush()

    def received(self, data: bytes) -> None:
        """Take what a client sent."""
        now = self._now()
        waits = self.link.state is LinkState.LOGGING_IN
        self.link.feed(data, now)
        self.hearing.begin()
        self._pump(now)
        if waits and self.link.state is LinkState.LOGGING_IN:
            self._connection.pause_reading()  # nobody knows yet who fills our memory

    def congested(self) -> None:
        """Stop reading from a client that does not read."""
        self._slow = True
        self._writable.clear()
        self._connection.pause_reading()

    def writable(self) -> None:
        """Go on with a client that has caught up."""
        self._slow = False
        self._writable.set()
        self._connection.resume_reading()
        self._flush()

    def expired(self) -> None:
        """Act on a deadline."""
        self._due = None
        now = self._now()
        self.link.tick(now)
        self._flush()

    def closed(self, reason: str) -> None:
        """Forget the client; its channels are left once what it asked is done."""
        if self._rejected:
            return
        counts.CONNECTIONS.add(-1)
        self.link.end(reason)
        self._depart()

    def _depart(self) -> None:
        """Leave the channels: the link is over, although the peer may not have noticed."""
        if self._departed:
            return
        self._departed = True
        if self._late is not None:
            self._late.cancel()
        self.hearing.end()
        self._writable.set()
        self._server.left(self)
        if self.session is not None:
            self.session.end()
            self._server.spawn(self._leave(self.session))

    async def _leave(self, session: ChannelSession) -> None:
        """Leave only when nothing is under way any more: a join that is decided later must not stay behind."""
        while self._under_way:
            await asyncio.wait(set(self._under_way))
        await session.close()
        self._connection.close(self.link.ended or "the client is out")

    def shut_down(self) -> None:
        """Tell the client that the server stops."""
        self.link.fail("SERVER_SHUTTING_DOWN")
        self._flush()

    def remoderate(self, moderation: Moderation) -> None:
        """Ask another modulator from now on."""
        self._moderation = moderation
        self.link.takes_direct = moderation.has("direct")

    @property
    def busy(self) -> bool:
        """Whether something the client asked is not answered yet."""
        return bool(self._under_way)

    # --- Requests

    def _pump(self, now: float) -> None:
        link, manager = self.link, self._server.manager
        received = 0
        while (request := link.next_request(now, self._server.now_ms(), manager.is_connected)) is not None:
            received += len(request.run) if isinstance(request, AskRun) else 1
            self._carry_out(request)
        if received:
            counts.RECEIVED.add(received)
        self._flush()

    def _carry_out(self, request: Request) -> None:
        match request:
            case AskRun(run, channel):
                if self._moderation is not None and self._moderation.sees_broadcasts:
                    self._begin(self._moderated(run, channel), len(run))
                else:
                    self._broadcast(run, channel)
            case Ask(frame, command):
                if (
                    self._moderation is not None
                    and isinstance(command, c.Join)
                    and self._moderation.has("authorize_join")
                ):
                    self._begin(self._moderated_join(frame, command))
                else:
                    self._ask(frame, command)
            case Login(text, is_token):
                if is_token:
                    self._begin(self._authenticate(text))
                else:
                    self._identify(text)
            case ListChannels(frame):
                assert self.link.nid is not None
                f = frame.fields
                page = self._server.manager.channels(
                    self.link.nid, owner=f["owner"], page=f["page"], page_size=f["page_size"]
                )
                self.link.answered(frame, page)
            case Direct(frame):
                self._begin(self._direct(frame))
            case Resume(frame, channel):
                self._resume(frame, channel)

    def _ask(self, frame: Frame, command: c.Command, *, counted: bool = False) -> None:
        if self.link.resumes and isinstance(command, c.Join) and command.on_behalf is None:
            command = msgspec.structs.replace(command, wants_number=True)
            self.hearing.joining(frame, command.channel)
        elif isinstance(command, c.Leave) and command.on_behalf is None:
            self.hearing.leave(command.channel)
        try:
            answer = self._server.manager.ask(command, self.session)
        except Exception as exc:  # noqa: BLE001 - each kind has its answer
            self._one_failed(frame, exc)
            return
        if isinstance(answer, asyncio.Future):
            self._wait_for(answer, 0 if counted else 1, lambda: self._one_done(frame, answer))
        else:
            self._done(frame, answer)

    def _done(self, frame: Frame, answer: Any) -> None:
        if frame.name == "JOIN" and not (self.link.resumes and frame.fields["on_behalf"] is None):
            answer = None
        self.link.answered(frame, answer)
        if self.link.resumes and frame.name in ("JOIN", "LEAVE", "BROADCAST", "DELETE"):
            self.hearing.note(frame, channel_of(frame.fields["channel"]), answer)

    def _one_done(self, frame: Frame, future: asyncio.Future[Any]) -> None:
        error = future.exception()
        if error is None:
            self._done(frame, future.result())
        else:
            self._one_failed(frame, error)

    def _one_failed(self, frame: Frame, error: BaseException) -> None:
        if frame.name == "JOIN":
            self.hearing.not_joined(frame)
        self._failed(error, frame.id)

    def _broadcast(
        self,
        run: BroadcastRun,
        channel: ChannelId,
        payloads: tuple[bytes, ...] | None = None,
        *,
        counted: bool = False,
    ) -> asyncio.Future[Any] | None:
        """Broadcast a run; return what its answer waits for, if anything.  ``counted``: as under way, by the caller."""
        assert self.link.nid is not None
        given = tuple(run.payloads) if payloads is None else payloads
        command = c.BroadcastMany(channel, self.link.nid, given, self._server.now_ms())
        try:
            answer = self._server.manager.ask(command, self.session)
        except Exception as exc:  # noqa: BLE001
            self._run_failed(run, channel, given, exc)
            return None
        if not isinstance(answer, asyncio.Future):
            self._run_acked(run, channel, answer)
            return None
        self._wait_for(answer, 0 if counted else len(run), lambda: self._run_done(run, channel, given, answer))
        return answer

    def _run_done(
        self, run: BroadcastRun, channel: ChannelId, payloads: tuple[bytes, ...], future: asyncio.Future[Any]
    ) -> None:
        error = future.exception()
        if error is None:
            self._run_acked(run, channel, future.result())
        else:
            self._run_failed(run, channel, payloads, error)

    def _run_acked(self, run: BroadcastRun, channel: ChannelId, numbers: range) -> None:
        for size, times in Counter(map(len, run.payloads)).items():
            counts.PAYLOADS.observe(size, times)
        self.hearing.own(channel, numbers)
        self.link.run_answered(run, numbers)

    def _run_failed(
        self, run: BroadcastRun, channel: ChannelId, payloads: tuple[bytes, ...], error: BaseException
    ) -> None:
        """Refuse each message of a run, or find the one that was too large by asking for each by itself.

        By itself it also spends its number, as in the original.
        """
        if not isinstance(error, Refused):
            self._failed(error, None)
            return
        too_large = error.reason == "POLICY_VIOLATION"
        for number, payload in zip(run.id_list(), payloads, strict=True):
            if self.link.state is LinkState.ENDED:
                return
            if too_large:
                assert self.link.nid is not None
                frame = Frame("BROADCAST", {"id": number, "channel": str(channel)}, payload)
                self._ask(frame, c.Broadcast(channel, self.link.nid, payload, self._server.now_ms()))
            else:
                self._failed(error, number)

    def _failed(self, error: BaseException, id: int | None) -> None:
        if isinstance(error, Refused):
            self.link.refused(error, id)
        elif isinstance(error, ModulatorFailed):
            self.link.fail("INTERNAL_SERVER_ERROR", None, id)
        else:
            _log.warning("%s: a request failed: %s", self._connection.peer.address, error)
            self.link.fail("INTERNAL_SERVER_ERROR")

    # --- What has to be waited for

    def _wait_for(self, future: asyncio.Future[Any], requests: int, then: Any) -> None:
        loop = asyncio.get_running_loop()
        self._under_way[future] = loop.time()
        if self._late is None:
            self._late = loop.call_later(self._server.options.wire.request_timeout, self._tell_late)
        self.link.in_flight += requests
        if self.link.in_flight > self._server.options.wire.max_inflight_requests + 1:
            self.link.silent_close = True
            self.link.end("more requests under way than allowed")

        def done(_: asyncio.Future[Any]) -> None:
            del self._under_way[future]
            self.link.in_flight -= requests
            if not future.cancelled():
                then()
                self._flush()

        future.add_done_callback(done)

    def _tell_late(self) -> None:
        """Log what takes longer than ``request_timeout``; its answer is sent all the same, whenever it comes."""
        self._late = None
        loop, seconds = asyncio.get_running_loop(), self._server.options.wire.request_timeout
        now = loop.time()
        late = [future for future, since in self._under_way.items() if since + seconds <= now]
        if late:
            counts.LATE.add(len(late))
            _log.warning(
                "%s: %d requests take longer than %g s",
                self.link.nid or self._connection.peer.address,
                len(late),
                seconds,
            )
            self._under_way |= dict.fromkeys(late, float("inf"))
        first = min(self._under_way.values(), default=float("inf"))
        if first != float("inf") and not self._departed:
            self._late = loop.call_later(max(first + seconds - now, 0.001), self._tell_late)

    def _begin(self, work: Coroutine[Any, Any, None], requests: int = 1) -> None:
        task = self._server.spawn(work)
        self._wait_for(task, requests, task.exception)  # what is raised there is a fault, and logged by spawn

    def _identify(self, name: str) -> None:
        if not is_username(name):
            counts.IDENTIFY.add(result="failure")
            self.link.fail("BAD_REQUEST", "invalid NID format")
            return
        nid = Nid(name, self._server.options.domain)
        if self._server.manager.is_connected(nid):
            counts.IDENTIFY.add(result="failure")
            self.link.name_in_use()
            return
        counts.IDENTIFY.add(result="success")
        self._enter(nid)

    async def _authenticate(self, token: str) -> None:
        assert self._moderation is not None
        try:
            found = await self._moderation.authenticate(token)
        except ModulatorFailed as exc:
            counts.AUTH.add(result="failure")
            self.link.fail("INTERNAL_SERVER_ERROR", f"authentication error: {exc.reason}")
            return
        if isinstance(found, Challenge):
            counts.AUTH.add(result="challenge")
            self.link.challenged(found.text)
        elif found is None:
            counts.AUTH.add(result="failure")
            self.link.login_refused()
        elif not is_username(found):
            counts.AUTH.add(result="failure")
            self.link.fail("INTERNAL_SERVER_ERROR", "invalid NID format")
        elif self.link.state is LinkState.LOGGING_IN:
            counts.AUTH.add(result="success")
            self._enter(Nid(found, self._server.options.domain))
        self._pump(self._now())
        if not self._slow and self.link.state is not LinkState.LOGGING_IN:
            self._connection.resume_reading()

    def _enter(self, nid: Nid) -> None:
        self.hearing.wait_a_moment()
        self.session = self._server.manager.connect(nid, sink=self.hearing.hear)
        self.link.logged_in(nid, self._now())

    async def _moderated(self, run: BroadcastRun, channel: ChannelId) -> None:
        """Show a run to the modulator, then broadcast what it made of it; runs of one client in their order."""
        nid, moderation, ids = self.link.nid, self._moderation, run.id_list()
        assert nid is not None
        assert moderation is not None
        async with self._in_turn:
            try:
                if not await moderation.may_broadcast(nid, channel):
                    for number in ids:
                        self.link.fail("NOT_ALLOWED", None, number)
                    return
                payloads, _ = await moderation.transform(nid, channel, run.payloads)
            except ModulatorFailed:
                counts.FORWARDED.add(result="error")
                self.link.fail("INTERNAL_SERVER_ERROR", None, ids[0])
                return
            good = payloads.index(None) if None in payloads else len(payloads)
            for before, after in zip(run.payloads[:good], payloads[:good], strict=True):
                counts.FORWARDED.add(result="valid" if after == before else "valid_altered")
            storing = None
            if good and self.link.state is not LinkState.ENDED:
                taken = tuple(payload for payload in payloads[:good] if payload is not None)
                storing = self._broadcast(run.first(good), channel, taken, counted=True)
            if good == len(ids):
                return
            if storing is not None:  # what was good is answered before the connection ends
                await asyncio.wait([storing])
            counts.FORWARDED.add(result="invalid" if good < len(payloads) else "error")
            self.link.fail("BAD_REQUEST" if good < len(payloads) else "INTERNAL_SERVER_ERROR", None, ids[good])

    async def _moderated_join(self, frame: Frame, command: c.Join) -> None:
        assert self._moderation is not None
        try:
            allowed = await self._moderation.may_join(command.on_behalf or command.nid, command.channel)
        except ModulatorFailed as exc:
            self._failed(exc, frame.id)
            return
        if not allowed:
            self.link.fail("NOT_ALLOWED", None, frame.id)
        elif self.link.state is not LinkState.ENDED:
            self._ask(frame, command, counted=True)

    async def _direct(self, frame: Frame) -> None:
        assert self._moderation is not None
        assert self.link.nid is not None
        if not self._moderation.has("direct"):  # another one since it was asked
            self.link.fail("UNEXPECTED_MESSAGE")
            return
        try:
            taken = await self._moderation.direct(self.link.nid, frame.payload or b"")
        except ModulatorFailed as exc:
            self._failed(exc, frame.id)
            return
        if taken:
            self.link.send(encode_frame("MOD_DIRECT_ACK", {"id": frame.id}))
        else:
            self.link.fail("BAD_REQUEST", None, frame.id)

    # --- Replays

    def _resume(self, frame: Frame, channel: ChannelId) -> None:
        replay = self.hearing.resume(frame, channel)
        self.link.in_flight += 1
        self._begin(self._replayed(replay), 0)

    async def _replayed(self, replay: Replay) -> None:
        """Replay a channel; as a request it is under way only until it is answered."""
        try:
            begin = await replay.begin()
        finally:
            self.link.in_flight -= 1
        if begin is not None:
            await replay.run(begin)

    # --- Output

    def _flush(self) -> None:
        link = self.link
        if self._slow and link.ended is None:
            if link.waiting > self._server.options.wire.outbound_message_queue_size:
                counts.QUEUE_FULL.add()
                link.overflow()
            else:
                return
        if link.has_output:
            self._write(None if link.ended is not None else PIECE_BYTES)
        if link.ended is not None:
            if link.silent_close:
                self._connection.abort(link.ended)
            elif self.session is None:
                self._connection.close(link.ended)
            self._depart()  # a member's connection ends once its channels are left: who sees the end can come back
        elif link.deadline != self._due:
            self._due = link.deadline
            seconds = None if self._due is None else max(0.0, self._due - self._now())
            self._connection.set_deadline(seconds, absolute=True)

    def _write(self, most: int | None) -> None:
        """Write what there is, a piece at a time until the peer has to read first."""
        link, connection = self.link, self._connection
        connection.write_many(link.take_output(most))
        while link.has_output:
            connection.flush()
            if self._slow:
                return
            connection.write_many(link.take_output(most))
