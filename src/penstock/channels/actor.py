"""One channel's place in the manager: its commands, one after another, each through decide, disk, apply.

Commands of one channel wait in one queue.  Those that need no disk are answered at once when nothing is before them,
and so are messages that may become durable later: they are written to the page cache without a change of threads.
Runs of broadcasts, of pushes and of pops go to disk together: one write, one sync, many answers.  A message that is
alone in the whole manager is synced on the event loop as long as the disk is quick (docs/decisions/097).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from penstock.channels import commands as c
from penstock.channels.core import ShardCore
from penstock.channels.decisions import Append, Decision, Save
from penstock.channels.files import READ_BYTES, ChannelFiles, LogState
from penstock.channels.live import LiveChannel
from penstock.channels.model import ChannelType
from penstock.errors import Backpressure, Refused

if TYPE_CHECKING:
    from penstock.channels.manager import ChannelManager

__all__ = ["Actor"]

_log = logging.getLogger(__name__)

MAX_RUN: Final = 1024
"""How many messages go to disk together at the most."""
MAX_WAITING: Final = 16_384
"""How many commands may wait for one channel."""
TELL_EVENTS = (c.Join, c.Leave, c.Delete, c.SetConfig)
RUNS = (c.Broadcast, c.BroadcastMany, c.Push, c.Pop)
IN_MEMORY = (c.GetConfig, c.GetAcl, c.Members)
ON_THE_LOG = (c.Broadcast, c.BroadcastMany, c.History, c.Range, c.Push, c.Pop, c.Length, c.Clear)


class CloseLog(c.Command, frozen=True):
    """Let go of the log until it is needed again; the manager's own command."""


Waiting = tuple[c.Command, object, "asyncio.Future[Any]"]


class Actor:
    """The queue of one handler.  Lives on the event loop; only ``files`` is touched by other threads."""

    def __init__(self, manager: ChannelManager, core: ShardCore, files: ChannelFiles) -> None:
        self._manager, self._core, self.files = manager, core, files
        self._waiting: deque[Waiting] = deque()
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return self._task is None

    def channel(self) -> LiveChannel | None:
        """Return the live channel, if there is one."""
        return self._core.channels.get(self.files.handler)

    async def submit(self, command: c.Command, source: object = None) -> Any:
        """Do what a command says and return its answer; ``source`` is the connection that asks."""
        answer = self.ask(command, source)
        return await answer if isinstance(answer, asyncio.Future) else answer

    def ask(self, command: c.Command, source: object = None) -> Any:
        """Return the answer to a command, or a future of it when something has to be waited for."""
        if self._task is None and not (self._manager.event_gate and isinstance(command, TELL_EVENTS)):
            if self._in_memory(command):
                decision = self._core.decide(command)
                if not decision.steps:
                    return self._done(decision, source)
                self._core.undo(decision)  # it needs the disk after all: it is decided again when its turn comes
            elif self._at_once(command):
                return self._append_at_once(command, source)
        if len(self._waiting) >= MAX_WAITING:
            raise Backpressure(f"channel {self.files.handler}: {len(self._waiting)} commands wait")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, source, future))
        if self._task is None:
            self._begin()
        return future

    def _in_memory(self, command: c.Command) -> bool:
        """Whether a command may be decided right away: deciding a broadcast spends a number, so it is not tried."""
        channel = self.channel()
        if channel is None or not channel.config.persist:
            return not isinstance(command, CloseLog)
        return isinstance(command, IN_MEMORY)

    def _at_once(self, command: c.Command) -> bool:
        """Whether a command is an append that waits for nothing, which takes less than changing threads."""
        channel = self.channel()
        if channel is None or not channel.flush_interval():
            return False
        if not self.files.flushes_later:
            return False
        if isinstance(command, c.BroadcastMany):
            return self.files.has_room(command.payloads, READ_BYTES)
        return isinstance(command, (c.Broadcast, c.Push)) and self.files.has_room((command.payload,), READ_BYTES)

    def _append_at_once(self, command: c.Command, source: object) -> Any:
        decision = self._core.decide(command)
        try:
            if decision.steps:
                self.files.append([step for step in decision.steps if isinstance(step, Append)])
        except BaseException:
            self._core.undo(decision)
            self._begin(look_again=True)
            raise
        return self._done(decision, source)

    def _done(self, decision: Decision, source: object) -> Any:
        self._core.apply(decision)
        self._manager.deliver(decision.events, source)
        return decision.answer

    async def _pass_gate(self, decision: Decision, source: object) -> None:
        """Deliver each event that whoever moderates the channels was told of; a failure there withholds it."""
        for event in decision.events:
            gate = self._manager.event_gate
            try:
                if gate is not None and isinstance(event, c.Event):
                    await gate(event)
            except Exception as exc:  # noqa: BLE001 - nothing that moderates may stop a channel
                _log.warning("channel %s: %s was not told to its members: %s", self.files.handler, event, exc)
            else:
                self._manager.deliver((event,), source)

    async def settle(self) -> None:
        """Return when everything asked so far is done."""
        if self._task is not None:
            await asyncio.wait([self._task])

    # --- The queue

    def _begin(self, *, look_again: bool = False) -> None:
        self._manager.busy += 1
        self._task = asyncio.get_running_loop().create_task(self._drain(look_again=look_again))

    async def _drain(self, *, look_again: bool = False) -> None:
        try:
            if look_again:
                await self._look_again()
            while self._waiting:
                await self._work(self._next_run())
        finally:
            self._task = None
            self._manager.busy -= 1
            for _, _, future in self._waiting:  # only if the loop is being torn down
                future.cancel()
            self._waiting.clear()
            self._manager.drained(self)

    def _next_run(self) -> list[Waiting]:
        """Take the next command, with those behind it that go to disk together with it."""
        run = [self._waiting.popleft()]
        kind = type(run[0][0])
        if kind in RUNS:
            while self._waiting and type(self._waiting[0][0]) is kind and len(run) < MAX_RUN:
                run.append(self._waiting.popleft())
        return run

    async def _work(self, run: list[Waiting]) -> None:
        try:
            if isinstance(run[0][0], CloseLog):
                await self._manager.in_thread(self.files.close)
                _answer(run[0][2], None)
                return
            if self._needs_log(run[0][0]):
                await self._open_log()
        except asyncio.CancelledError:
            raise
        except BaseException as exc:  # noqa: BLE001 - it belongs to whoever asked
            for _, _, future in run:
                _fail(future, exc)
            return
        decided: list[tuple[Waiting, Decision]] = []
        for waiting in run:
            try:
                decided.append((waiting, self._core.decide(waiting[0])))
            except Exception as exc:  # noqa: BLE001
                _fail(waiting[2], exc)
        if decided and isinstance(run[0][0], c.Delete) and self._manager.event_gate:
            decided = await self._ask_gate(decided)
        if decided:
            await self._carry_out(decided)

    async def _ask_gate(self, decided: list[tuple[Waiting, Decision]]) -> list[tuple[Waiting, Decision]]:
        """Return the deletions that may go on: whoever moderates the channels was told of them."""
        allowed = []
        for waiting, decision in decided:
            try:
                for event in decision.events:
                    if self._manager.event_gate is not None and isinstance(event, c.Event):
                        await self._manager.event_gate(event)
                allowed.append((waiting, decision))
            except Exception as exc:  # noqa: BLE001 - it belongs to whoever asked
                self._core.undo(decision)
                _fail(waiting[2], exc)
        return allowed

    async def _carry_out(self, decided: list[tuple[Waiting, Decision]]) -> None:
        decisions = [decision for _, decision in decided]
        if not any(decision.steps for decision in decisions):
            answers: list[Any] = [decision.answer for decision in decisions]
        else:
            try:
                answers = await self._take_steps(decisions)
            except asyncio.CancelledError:
                raise
            except BaseException as exc:  # noqa: BLE001
                answers = [exc] * len(decisions)
        failed = False
        for ((command, source, future), decision), answer in zip(decided, answers, strict=True):
            if isinstance(answer, BaseException):
                failed = True
                self._core.undo(decision)
                _fail(future, answer)
                continue
            self._core.apply(decision)
            if self._manager.event_gate and isinstance(command, TELL_EVENTS) and not isinstance(command, c.Delete):
                await self._pass_gate(decision, source)
            else:
                self._manager.deliver(decision.events, source)
            _answer(future, answer)
        if failed:
            await self._look_again()

    async def _take_steps(self, decisions: list[Decision]) -> list[Any]:
        answers: list[Any]
        first = decisions[0]
        if len(decisions) == 1 and len(first.steps) == 1 and not first.after and isinstance(first.steps[0], Save):
            await self._manager.saver.save(first.steps[0].channel)  # together with those of other channels
            return [first.answer]
        on_loop = len(decisions) == 1 and self._stays_on_the_loop(first)
        if on_loop:
            answers = self.files.carry_out(decisions)
        else:
            answers = await self._manager.in_thread(self.files.carry_out, decisions)
        self._manager.note_damage(self)
        if isinstance(first.steps[0], Append) and first.steps[0].sync:
            self._manager.patience.took(self.files.sync_seconds, on_loop=on_loop)
        return answers

    def _stays_on_the_loop(self, decision: Decision) -> bool:
        """Whether to wait for the disk right here: a message alone, nothing else under way, and a disk that is quick.

        Whoever was about to ask has done so by now: the task that calls this began a turn of the loop later.
        """
        if self._waiting or self._manager.busy > 1 or len(decision.steps) > 1:
            return False
        (step,) = decision.steps
        if not isinstance(step, Append) or not self.files.has_room(step.payloads):
            return False
        return self._manager.patience.allows()

    # --- The log

    def _needs_log(self, command: c.Command) -> bool:
        """Whether a command can only be decided once it is known how far the log goes."""
        if isinstance(command, CloseLog):
            return True
        if self.files.is_open:
            return False
        channel = self.channel()
        if channel is None or not channel.config.persist:
            return False
        if isinstance(command, c.SetConfig):
            return command.type is not None or command.message_flush_interval is not None
        return isinstance(command, ON_THE_LOG) or (isinstance(command, c.Join) and command.wants_number)

    async def _open_log(self) -> None:
        channel = self.channel()
        if channel is None:
            return
        state: LogState = await self._manager.in_thread(
            lambda: self.files.open(fifo=channel.kind is ChannelType.FIFO, flush_interval=channel.flush_interval())
        )
        self._core.log_opened(channel, state.next_seq, state.head)
        self._manager.log_opened(self)
        self._manager.note_damage(self)

    async def _look_again(self) -> None:
        """After a failure on disk: see how far the log really goes."""
        channel = self.channel()
        if channel is None or not self.files.is_open:
            return
        try:
            fifo = channel.kind is ChannelType.FIFO
            state: LogState = await self._manager.in_thread(lambda: self.files.state(fifo=fifo))
        except asyncio.CancelledError:
            raise
        except BaseException as exc:  # noqa: BLE001 - the next command meets it again
            _log.warning("channel %s: its log cannot be looked at: %s", self.files.handler, exc)
            return
        self._core.log_opened(channel, state.next_seq, state.head)


def _answer(future: asyncio.Future[Any], answer: Any) -> None:
    if not future.done():  # whoever asked may have gone
        future.set_result(answer)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        if isinstance(error, Refused):
            future.exception()  # a refusal nobody waits for any more is no news
