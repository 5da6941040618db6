"""The deciding part of the broker: sessions, subscriptions, who gets what.  No socket, clock, file or task in it.

    link = Link(broker)         one for each connection; bytes in, bytes out
    broker.tick()               when ``next_due`` has come: wills, sessions and messages that expire

Time comes from a Clock, changes go to a Journal.  Everything is called from one thread.

Invariants:

1. A session has at most one link, and a link at most one session; a link that lost its session decides nothing more.
2. A change is told to the journal before the answer that promises it.
3. A message is in every matching session's state, or counted as dropped for it, before its publisher gets an answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.kernel.mqtt import Run
from penstock.mqtt.access import Access, Authenticator, Method
from penstock.mqtt.dispatch import Dispatch, run_of
from penstock.mqtt.gate import Gate, OpenGate
from penstock.mqtt.journal import Journal, MemoryJournal
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.packets import Connect, Filter
from penstock.mqtt.reasons import Reason
from penstock.mqtt.retained import Kept
from penstock.mqtt.routes import Copies, Recipient, Subscription
from penstock.mqtt.session import NEVER, Session
from penstock.mqtt.shared import SharedGroup
from penstock.mqtt.topics import is_filter, split_share

if TYPE_CHECKING:
    from penstock.mqtt.outgoing import Outgoing

__all__ = ["Broker"]

HANDED_AT_ONCE: Final = 1000
"""Messages of a session that is over which go to others of its group before everybody else has a turn."""
A_MOMENT: Final = 0.001


class Broker(Dispatch):
    """All sessions of one broker.

    >>> broker = Broker()
    >>> broker.publish_message("a/b", b"on", retain=True)
    >>> len(broker.retained)
    1
    """

    def __init__(
        self,
        options: BrokerOptions | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        journal: Journal | None = None,
        gate: Gate | None = None,
        access: Access | None = None,
        authenticator: Authenticator | None = None,
        methods: Mapping[str, Method] | None = None,
    ) -> None:
        super().__init__(options or BrokerOptions(), clock, journal or MemoryJournal())
        self.gate: Gate = gate or OpenGate()
        self.authenticator = authenticator
        self.methods = dict(methods or {})
        self.links: set[Outgoing] = set()
        self.groups: dict[tuple[str, str], SharedGroup] = {}
        self.subscription_count = 0
        self.rules_changed(access)

    # --- Rules

    def rules_changed(self, access: Access | None) -> None:
        """Take other rules, or the same ones after they changed; nobody is dropped."""
        self.access = access
        self.routes.allowed = None if access is None else self._may_receive
        self.routes.clear()
        for session in self.sessions.values():
            session.permits.clear()
        for link in self.links:
            link._short = None  # the next read goes the long way, which asks whether there are rules

    def _forget_permissions(self, session: Session) -> None:
        """Ask again what a session may receive: it belongs to another user now."""
        for subscription in session.subscriptions.values():
            self.routes.changed(subscription.filter)

    def _may_receive(self, session: Session, topic: str) -> bool:
        return self.may(session, "receive", topic)

    # --- Connections

    def assign_client_id(self) -> str:
        """Return an id that no session has."""
        while True:
            client_id = f"penstock-{secrets.token_hex(8)}"
            if client_id not in self.sessions:
                return client_id

    def attach(self, link: Outgoing, connect: Connect, client_id: str, username: str | None) -> tuple[Session, bool]:
        """Give a link its session; return whether there was one already.  Whoever had it is disconnected."""
        options = self.options
        old = self.sessions.get(client_id)
        if old is not None and old.link is not None:
            old.link.taken_over()
        old = self.sessions.get(client_id)  # it may have ended with its connection
        if connect.version == 5:
            expiry = min(connect.properties.session_expiry or 0, options.max_session_expiry)
        else:
            expiry = 0 if connect.clean else options.max_session_expiry
        if old is not None and (connect.clean or self.is_over(old)):
            self.counts.sessions_expired += old.persistent and self.is_over(old)
            self.end_session(old)
            old = None
        if old is None:
            session = self.sessions[client_id] = Session(client_id, options, self.budget)
        else:
            session = old
        if old is not None and old.username != username and self.access is not None:
            self._forget_permissions(old)
        session.username, session.expiry, session.expires_at = username, expiry, None
        session.will, session.will_at = connect.will, None
        session.permits.clear()
        self.connected += session.link is None
        session.link, session.connected_at = link, self.clock.monotonic()
        session.ready = True
        if self.journal.keeps:
            if session.kept:
                self.journal.session(session)
            elif session.number:
                self.journal.ended(session, list(session.subscriptions))
        return session, old is not None

    def detach(self, link: Outgoing, session: Session, *, normal: bool) -> None:
        """Take the link from a session; ``normal`` is after a DISCONNECT that says so, which removes the will."""
        if session.link is not link:
            return
        session.link, session.ready = None, False
        self.connected -= 1
        session.resend = None
        session.replays.clear()
        now = self.clock.monotonic()
        if normal:
            session.will = None
        elif session.will is not None:
            delay = min(session.will.properties.will_delay or 0, session.expiry)
            if delay and (self.journal.keeps or not self.closing):
                session.will_at = now + delay
                self.at(session.will_at, lambda: self.will_due(session))
            else:
                self._fire_will(session)
        if not session.persistent:
            if not self.closing and self.hand_on(session, HANDED_AT_ONCE):
                session.expires_at = now
                if session.owed:  # it was kept: as one that has expired its messages are handed on after a kill as well
                    session.expiry = 1
                    self.journal.session(session)
                self.at(now + A_MOMENT, lambda: self.session_due(session))
            else:
                self.end_session(session)
            return
        if session.expiry != NEVER:
            session.expires_at = now + session.expiry
            self.at(session.expires_at, lambda: self.session_due(session))
        if self.journal.keeps:
            self.journal.session(session)

    def end_session(self, session: Session) -> None:
        """Forget a session and everything that waits for it; its will is due now at the latest."""
        if self.sessions.get(session.client_id) is not session:
            return
        if session.will is not None and session.link is None:
            self._fire_will(session)
        self.hand_on(session)
        filters = list(session.subscriptions)
        for subscription in list(session.subscriptions.values()):
            self._remove(subscription)
        session.subscriptions.clear()
        session.forget_messages()
        session.received.clear()
        del self.sessions[session.client_id]
        if session.number:
            self.journal.ended(session, filters)

    def kick(self, client_id: str, reason: Reason = Reason.ADMINISTRATIVE_ACTION, *, end: bool = False) -> bool:
        """Disconnect a client, and forget its session with ``end``; return whether there was one."""
        session = self.sessions.get(client_id)
        if session is None:
            return False
        if session.link is not None:
            session.link.disconnect(reason, "kicked")
        if end:
            self.end_session(session)
        return True

    def shut_down(self) -> None:
        """Disconnect everyone with 0x8B; sessions stay as they are, and wills with a delay where they are kept."""
        self.closing = True
        for link in list(self.links):
            link.disconnect(Reason.SERVER_SHUTTING_DOWN, "the broker stops")

    # --- Subscriptions

    def subscribe(self, session: Session, wanted: Filter, identifier: int) -> int:
        """Add one subscription; return the granted QoS or why not.  Retained messages begin to follow."""
        options = self.options
        group, name = split_share(wanted.filter)
        if group == "" or not is_filter(name) or name.count("/") >= options.max_topic_levels:
            return Reason.TOPIC_FILTER_INVALID
        if group is not None and not options.shared_subscriptions:
            return Reason.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED
        if not options.wildcard_subscriptions and ("+" in name or "#" in name):
            return Reason.WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED
        if identifier and not options.subscription_identifiers:
            return Reason.SUBSCRIPTION_IDS_NOT_SUPPORTED
        if wanted.filter in options.refused_filters:
            return Reason.UNSPECIFIED
        old = session.subscriptions.get(wanted.filter)
        if old is None and len(session.subscriptions) >= options.max_subscriptions:
            return Reason.QUOTA_EXCEEDED
        if not self.may(session, "subscribe", name):
            return Reason.NOT_AUTHORIZED
        subscription = Subscription(
            session,
            name,
            group,
            wanted.qos,
            wanted.no_local,
            wanted.retain_as_published,
            wanted.retain_handling,
            identifier,
        )
        replays = group is None and (wanted.retain_handling == 0 or (wanted.retain_handling == 1 and old is None))
        kept = self.retained.match(name) if replays else None
        if self.journal.full and session.persistent:  # who only asks again for what is kept is told that it is
            same = old is not None and old.options == subscription.options
            return wanted.qos if same and not kept else Reason.QUOTA_EXCEEDED
        self.add(subscription)
        if session.persistent and self.journal.keeps:
            self.journal.subscribed(subscription)
        if kept:
            session.replays.append(self._replay(subscription, kept))
        return wanted.qos

    def add(self, subscription: Subscription, *, first: bool = False) -> None:
        """Put a subscription into place; ``first`` where nothing can have been routed yet."""
        session = subscription.session
        self.subscription_count += subscription.name not in session.subscriptions
        session.subscriptions[subscription.name] = subscription
        if subscription.group is None:
            self.tree.put(subscription.filter, session, subscription)
        else:
            key = (subscription.group, subscription.filter)
            group = self.groups.get(key)
            if group is None:
                group = self.groups[key] = SharedGroup(*key)
            group.put(subscription)
            self.tree.put(subscription.filter, key, group)
        if not first:
            self.routes.changed(subscription.filter)

    def unsubscribe(self, session: Session, name: str) -> Reason:
        """Remove one subscription; what is under way is finished."""
        subscription = session.subscriptions.pop(name, None)
        if subscription is None:
            return Reason.NO_SUBSCRIPTION_EXISTED
        self._remove(subscription)
        if session.number:  # also where it is kept for its will only: what it had before is in the store
            self.journal.unsubscribed(session, name)
        return Reason.SUCCESS

    def _remove(self, subscription: Subscription) -> None:
        self.subscription_count -= 1
        if subscription.group is None:
            self.tree.remove(subscription.filter, subscription.session)
        else:
            key = (subscription.group, subscription.filter)
            group = self.groups[key]
            group.remove(subscription.session)
            if not group.members:
                del self.groups[key]
                self.tree.remove(subscription.filter, key)
        self.routes.changed(subscription.filter)

    def _replay(self, subscription: Subscription, kept: list[Kept]) -> Iterator[tuple[Run, int, bytes]]:
        """Yield the retained messages of a subscription, each as it is when its turn comes: never an old one."""
        identifiers, granted = Recipient([subscription]).identifiers, subscription.qos
        for each in kept:
            run = each.run
            if run is None:
                continue
            if run.expiry >= 0 and run.deadline <= self.clock.monotonic():
                continue
            if self.access is not None and not self.may(subscription.session, "receive", run.topic.decode()):
                continue
            yield run, min(run.qos, granted), identifiers

    # --- Taps

    def tap(self, filter: str, copies: Copies) -> None:
        """Have what a filter matches copied."""
        self.tree.put(filter, copies, copies)
        self.routes.changed(filter)

    def untap(self, filter: str, copies: Copies) -> None:
        """Have it copied no more."""
        self.tree.remove(filter, copies)
        self.routes.changed(filter)

    # --- Time

    def will_due(self, session: Session) -> None:
        """Publish a will whose delay has passed."""
        if session.will_at is not None and session.will_at <= self.clock.monotonic():
            self._fire_will(session)
            if session.number:
                self.journal.session(session)

    def session_due(self, session: Session) -> None:
        """Forget a session that has expired."""
        if self.is_over(session):
            if self.hand_on(session, HANDED_AT_ONCE):
                self.at(self.clock.monotonic() + A_MOMENT, lambda: self.session_due(session))
                return
            self.counts.sessions_expired += session.persistent  # else it was over with its connection
            self.end_session(session)

    def _fire_will(self, session: Session) -> None:
        will, session.will, session.will_at = session.will, None, None
        if will is None:
            return
        if will.topic.startswith("$SYS/") or not self.may(session, "publish", will.topic):
            self.count_drop("not authorized", 1)
            return
        run = run_of(will)
        if run.expiry >= 0:
            run.deadline = self.clock.monotonic() + run.expiry
        self.publish(run, session)
