"""The deciding part of channels: commands in, decisions out.  No file, socket, thread, clock or task in it.

    decision = core.decide(command)      raises Refused, or says which steps the disk must take
    … the shell takes the steps …
    core.apply(decision)                 only if all of them worked: memory follows the disk
    core.undo(decision)                  otherwise: as if nothing had been asked

Invariants:

1. Nothing another command could see changes before ``apply``, except numbers that are spent by being given out:
   the sequence number of a broadcast, the place in a queue of a push or a pop that is under way, and the slot that
   a join reserves.  ``undo`` gives all of them back.  A broadcast that is refused for its size has spent its number, as
   in the original.
2. The shell works on one channel in order: decide, steps, apply, then the next command.  Only runs of
   broadcasts, of pushes and of pops may be decided together; they are then applied together.
3. Different channels may be in flight at the same time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Any

from penstock.channels import commands as c, rules
from penstock.channels.decisions import (
    Append,
    Decision,
    Evict,
    Flush,
    NoteQueue,
    ReadLog,
    ReadRange,
    Remove,
    Reopen,
    Save,
    Step,
    Take,
    WriteCursor,
)
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.live import LiveChannel, Memberships
from penstock.channels.model import ChannelType, Config, Limits, PersistedChannel
from penstock.errors import OptionsError, Refused

__all__ = ["ShardCore", "shard_of"]


class ShardCore:
    """The channels of one shard.

    >>> core = ShardCore("localhost", Limits())
    >>> ann, jobs = Nid("ann", "localhost"), ChannelId("jobs", "localhost")
    >>> decision = core.decide(c.Join(jobs, ann))
    >>> core.channels
    {}
    >>> core.apply(decision); core.channels["jobs"].owner
    Nid(username='ann', domain='localhost')
    """

    def __init__(
        self,
        domain: str,
        limits: Limits,
        memberships: Memberships | None = None,
        *,
        authenticated: bool = True,
        flush_floor: int = 0,
    ) -> None:
        self._flush_floor = flush_floor
        self.domain, self.limits, self.authenticated = domain, limits, authenticated
        self.memberships = memberships or Memberships()
        self.channels: dict[str, LiveChannel] = {}
        self._deciders: dict[type[c.Command], Callable[[Any], Decision]] = {
            c.Join: self._join,
            c.Leave: self._leave,
            c.Delete: self._delete,
            c.Broadcast: self._broadcast,
            c.BroadcastMany: self._broadcast_many,
            c.SetAcl: self._set_acl,
            c.GetAcl: self._get_acl,
            c.SetConfig: self._set_config,
            c.GetConfig: self._get_config,
            c.Members: self._members,
            c.History: self._history,
            c.Range: self._range,
            c.Push: self._push,
            c.Pop: self._pop,
            c.Length: self._length,
            c.Clear: self._clear,
        }

    def decide(self, command: c.Command) -> Decision:
        """Return what is to be done; Refused if the rules say no."""
        decider = self._deciders.get(type(command))
        if decider is None:
            raise OptionsError(f"{type(command).__name__} is no command for a channel")
        return decider(command)

    def apply(self, decision: Decision) -> None:
        """Let memory follow the disk."""
        decision.apply()

    def undo(self, decision: Decision) -> None:
        """Forget a decision whose steps failed."""
        decision.undo()

    def restore(self, saved: PersistedChannel) -> LiveChannel:
        """Put a channel from disk into place; no limit applies to what was there before."""
        channel = LiveChannel.restored(saved, self.limits, self._flush_floor)
        self._insert(channel)
        for nid in channel.members:
            self.memberships.take(nid, channel.handler)
        return channel

    def log_opened(self, channel: LiveChannel, next_seq: int, head: int | None) -> None:
        """Learn how far the log of a channel goes, and where the cursor of a queue is (None: unusable).

        Also called after a failed append, which may have brought some of its entries into the log.
        """
        channel.log_next = next_seq
        if channel.kind is ChannelType.FIFO:
            channel.next_seq, channel.head = next_seq, head
        else:
            channel.next_seq = max(channel.next_seq, next_seq)

    # --- Members

    def _join(self, command: c.Join) -> Decision:
        rules.served(command.channel, self.domain)
        handler = command.channel.handler
        channel = self.channels.get(handler)
        if channel is None:
            rules.may_create(self.memberships.channels, self.limits)
        target = command.on_behalf or command.nid
        rules.join(channel, command, self.memberships.count(target), self.limits)
        created = channel is None
        if channel is None:
            channel = LiveChannel(handler, Config.of_limits(self.limits), self._flush_floor)
            self.memberships.channels += 1
        self.memberships.take(target, handler)
        members = list(channel.members)
        insort(members, target)
        after, owner, live = tuple(members), channel.owner or target, channel

        def apply() -> None:
            if created:
                self.memberships.channels -= 1  # _insert counts it
                self._insert(live)
            live.owner = owner
            live.set_members(after)

        def undo() -> None:
            self.memberships.release(target, handler)
            if created:
                self.memberships.channels -= 1

        number = channel.next_seq - 1 if created or command.wants_number else None
        event = c.Event("MEMBER_JOINED", command.channel, target, created, after, number)
        steps = (Save(channel.snapshot(owner=owner, members=after)),) if channel.config.persist else ()
        return Decision(command.channel, steps, apply, undo, (event,), number if command.wants_number else None)

    def _leave(self, command: c.Leave) -> Decision:
        channel = self._served(command)
        rules.leave(channel, command)
        target = command.on_behalf or command.nid
        was_owner = channel.owner == target
        if was_owner and channel.kind is ChannelType.FIFO:
            return self._ending(command.channel, channel, "CHANNEL_DELETED")
        left = c.Event("MEMBER_LEFT", command.channel, target, was_owner, channel.members)
        if channel.size == 1:
            return self._ending(command.channel, channel, left)
        after = tuple(nid for nid in channel.members if nid != target)
        owner = after[0] if was_owner else channel.owner
        events = [left]
        if was_owner:
            events.append(c.Event("MEMBER_JOINED", command.channel, owner, True, after))

        def apply() -> None:
            self.memberships.release(target, channel.handler)
            channel.owner = owner
            channel.set_members(after)

        steps = (Save(channel.snapshot(owner=owner, members=after)),) if channel.config.persist else ()
        return Decision(command.channel, steps, apply, events=tuple(events))

    def _delete(self, command: c.Delete) -> Decision:
        channel = self._served(command)
        rules.owner(channel, command.nid)
        return self._ending(command.channel, channel, "CHANNEL_DELETED")

    def _members(self, command: c.Members) -> Decision:
        channel = self._served(command)
        rules.member(channel, command.nid)
        return Decision(command.channel, answer=rules.paged(channel.members, command.page, command.page_size, 20, 100))

    # --- Rules of a channel

    def _get_acl(self, command: c.GetAcl) -> Decision:
        channel = self._served(command, "NOT_ALLOWED")
        rules.owner(channel, command.nid)
        entries = tuple(channel.acl.of(command.kind).entries())
        if command.page is None or command.page_size is None:
            return Decision(command.channel, answer=c.Page(entries))
        part = rules.paged(entries, command.page, command.page_size, 0, command.page_size).items
        return Decision(command.channel, answer=c.Page(part, command.page, command.page_size, len(entries)))

    def _set_acl(self, command: c.SetAcl) -> Decision:
        channel = self._served(command, "NOT_ALLOWED")
        rules.owner(channel, command.nid)
        old = channel.acl.of(command.kind)
        allow = old.add(command.nids) if command.action == "add" else old.remove(command.nids)
        rules.acl_size(channel, allow)
        acl = channel.acl.replace(command.kind, allow)
        steps = (Save(channel.snapshot(acl=acl)),) if channel.config.persist else ()
        return Decision(command.channel, steps, lambda: channel.set_acl(acl))

    def _get_config(self, command: c.GetConfig) -> Decision:
        channel = self._found(command)
        rules.member(channel, command.nid, "FORBIDDEN")
        return Decision(command.channel, answer=(channel.config, channel.kind))

    def _set_config(self, command: c.SetConfig) -> Decision:
        wanted = rules.config_request(command, self.domain, self.limits, authenticated=self.authenticated)
        channel = self._found(command)
        rules.owner(channel, command.nid)
        old, new = channel.config, rules.merged(channel.config, command)
        kind = rules.config_change(channel, new, wanted)
        saved = Save(channel.snapshot(config=new, channel_type=kind))
        becomes_queue = kind is not channel.kind
        begin = channel.log_next if old.persist else 1  # by the log alone: numbers of refused messages are not in it
        steps: list[Step] = []
        after: tuple[Step, ...] = ()
        if new.persist:
            if not old.persist:
                steps.append(Remove(first_time=True))
            elif becomes_queue or new.message_flush_interval != old.message_flush_interval:
                steps.append(Flush())
            if becomes_queue:
                steps.append(WriteCursor(begin, first_time=True))
            steps.append(saved)
            if becomes_queue or new.message_flush_interval != old.message_flush_interval:
                after = (Reopen(kind is ChannelType.FIFO, channel.flush_interval(new)),)
            if becomes_queue:
                after = (*after, NoteQueue())
        elif old.persist:
            steps.append(Remove())

        def apply() -> None:
            channel.config, channel.kind = new, kind
            if not new.persist or not old.persist:
                channel.log_next = 1
            if becomes_queue:
                channel.next_seq = channel.head = begin

        changed = becomes_queue or new != old
        event = c.Event("CHANNEL_RECONFIGURED", command.channel, None, None, channel.members)
        return Decision(command.channel, tuple(steps), apply, events=(event,) if changed else (), after=after)

    # --- Messages

    def _broadcast(self, command: c.Broadcast) -> Decision:
        rules.payload_given(command.payload)
        channel = self._served(command)
        rules.broadcast(channel, command)
        seq, channel.next_seq = channel.next_seq, channel.next_seq + 1
        rules.payload_size(channel, command.payload)
        name, nid, payload, timestamp = command.channel, command.nid, command.payload, command.timestamp
        message = c.Messages(name, nid, seq, timestamp, (payload,), channel.readers())
        if not channel.config.persist:
            return Decision(name, events=(message,), answer=seq)
        step = self._appending(channel, seq, timestamp, nid, (payload,))
        stored, undo = lambda: channel.stored(seq), lambda: channel.give_back(seq)
        return Decision(name, (step,), stored, undo, events=(message,), answer=seq)

    def _broadcast_many(self, command: c.BroadcastMany) -> Decision:
        payloads = command.payloads
        rules.payload_given(min(payloads, key=len, default=b"-"))
        channel = self._served(command)
        rules.broadcast(channel, command)
        # All or none: no number is spent on a run that is refused.
        rules.payload_size(channel, max(payloads, key=len, default=b""))
        first, channel.next_seq = channel.next_seq, channel.next_seq + len(payloads)
        numbers = range(first, channel.next_seq)
        name, nid, timestamp = command.channel, command.nid, command.timestamp
        run = c.Messages(name, nid, first, timestamp, payloads, channel.readers())
        events = (run,) if payloads else ()
        if not channel.config.persist or not payloads:
            return Decision(name, events=events, answer=numbers)
        step = self._appending(channel, first, timestamp, nid, payloads)
        stored, undo = lambda: channel.stored(numbers[-1]), lambda: channel.give_back(first)
        return Decision(name, (step,), stored, undo, events=events, answer=numbers)

    def _history(self, command: c.History) -> Decision:
        channel = self._served(command)
        rules.history(channel, command.nid)
        limit = command.limit if command.for_resume else min(command.limit, self.limits.max_history_limit)
        return Decision(command.channel, (ReadLog(command.from_seq, limit),))

    def _range(self, command: c.Range) -> Decision:
        channel = self._served(command)
        rules.history(channel, command.nid)
        return Decision(command.channel, (ReadRange(channel.next_seq - 1 if command.for_resume else None),))

    # --- Queues

    def _push(self, command: c.Push) -> Decision:
        rules.payload_given(command.payload)
        channel = self._served(command)
        rules.push(channel, command)
        seq, channel.next_seq = channel.next_seq, channel.next_seq + 1
        step = self._appending(channel, seq, command.timestamp, command.nid, (command.payload,))
        return Decision(command.channel, (step,), lambda: channel.stored(seq), lambda: channel.give_back(seq))

    def _pop(self, command: c.Pop) -> Decision:
        channel = self._served(command)
        rules.pop(channel, command)
        seq = channel.head or 0
        channel.head = seq + 1

        def undo() -> None:
            channel.head = min(channel.head or seq, seq)

        return Decision(command.channel, (Take(seq),), undo=undo, after=(Evict(seq + 1),))

    def _length(self, command: c.Length) -> Decision:
        channel = self._served(command)
        rules.queue(channel, command.nid)
        rules.owner(channel, command.nid)
        return Decision(command.channel, answer=channel.depth)

    def _clear(self, command: c.Clear) -> Decision:
        channel = self._served(command)
        rules.clear(channel, command)
        end = channel.next_seq

        def apply() -> None:
            channel.head = end

        return Decision(command.channel, (Flush(), WriteCursor(end)), apply, after=(Evict(end),))

    # --- What several have in common

    def _served(self, command: c.Command, foreign: str = "NOT_IMPLEMENTED") -> LiveChannel:
        rules.served(command.channel, self.domain, foreign)
        return self._found(command)

    def _found(self, command: c.Command) -> LiveChannel:
        channel = self.channels.get(command.channel.handler)
        if channel is None:
            raise Refused("CHANNEL_NOT_FOUND")
        return channel

    @staticmethod
    def _appending(channel: LiveChannel, seq: int, timestamp: int, nid: Nid, payloads: tuple[bytes, ...]) -> Append:
        config = channel.config
        keep = 0 if channel.kind is ChannelType.FIFO else config.max_persist_messages
        return Append(seq, timestamp, str(nid), payloads, not channel.flush_interval(), keep)

    def _insert(self, channel: LiveChannel) -> None:
        self.channels[channel.handler] = channel
        self.memberships.channels += 1

    def _ending(self, name: ChannelId, channel: LiveChannel, event: c.Event | c.EventKind) -> Decision:
        """Return the decision that ends a channel."""
        if isinstance(event, str):
            event = c.Event(event, name, None, None, channel.members)

        def apply() -> None:
            del self.channels[channel.handler]
            self.memberships.channels -= 1
            for nid in channel.members:
                self.memberships.release(nid, channel.handler)

        return Decision(name, (Remove(),) if channel.config.persist else (), apply, events=(event,))


def shard_of(hash: str, shards: int) -> int:
    """Return the shard of a channel by the hash of its handler: stable, and not kept anywhere.

    >>> shard_of("a2b8af6174488a84d9dd39d1b495570a2a77f6302924e673c212e2e60b29f97a", 4)
    1
    """
    return int(hash[:8], 16) % shards
