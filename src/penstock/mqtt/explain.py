"""Why was it not delivered?  What a broker does with a message of a topic, session by session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.mqtt.routes import Copies, Subscription
from penstock.mqtt.topics import matches

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker
    from penstock.mqtt.session import Session

__all__ = ["explain", "describe_session"]


def explain(broker: Broker, topic: str, client_id: str | None = None) -> dict[str, Any]:
    """Return what happens to a message of this topic, and what happened to the last ones."""
    sessions: dict[Session, list[Subscription]] = {}
    taps: dict[str, None] = {}
    for each in broker.tree.match(topic):
        if isinstance(each, Copies):
            taps[each.tap.name] = None
            continue
        for subscription in [each] if isinstance(each, Subscription) else each.members.values():
            sessions.setdefault(subscription.session, []).append(subscription)
    if client_id is not None:
        wanted = broker.sessions.get(client_id)
        sessions = {wanted: sessions.get(wanted, [])} if wanted is not None else {}
    return {
        "topic": topic,
        "retained": broker.retained.get(topic.encode()) is not None,
        "sessions": [_of_session(broker, topic, session, found) for session, found in sessions.items()],
        "matching": len(sessions),
        "taps": list(taps),
    }


def _of_session(broker: Broker, topic: str, session: Session, found: list[Subscription]) -> dict[str, Any]:
    fate, why = _fate(broker, topic, session, found)
    drops = [
        {"count": drop.count, "reason": drop.reason, "seconds_ago": round(broker.clock.monotonic() - drop.when, 3)}
        for drop in session.drops
        if drop.topic == topic
    ]
    return {
        "client": session.client_id,
        "filters": [each.name for each in found],
        "qos": max((each.qos for each in found), default=None),
        "now": fate,
        "why": why,
        "publish": _may_publish(broker, topic, session),
        "dropped": drops,
    }


def _may_publish(broker: Broker, topic: str, session: Session) -> str:
    """Say whether what this client publishes there goes anywhere, and which rule decides."""
    if topic.startswith("$SYS/"):
        return "denied: only the broker itself speaks there"
    if broker.access is None:
        return "allowed"
    verdict = "allowed" if broker.may(session, "publish", topic) else "denied"
    return f"{verdict}: {broker.access.rule(broker.who(session), 'publish', topic)}"


def _fate(broker: Broker, topic: str, session: Session, found: list[Subscription]) -> tuple[str, str]:
    if not found:
        near = [name for name in session.subscriptions if matches(name.lower(), topic.lower())]
        hint = f"; {near[0]!r} differs in case only" if near else ""
        return "filtered", f"none of its {len(session.subscriptions)} subscriptions matches{hint}"
    if broker.access is not None and not broker.may(session, "receive", topic):
        return "filtered", f"the rules: {broker.access.rule(broker.who(session), 'receive', topic)}"
    qos = max(each.qos for each in found)
    shared = ", in turn with the other members of its group" if all(each.group is not None for each in found) else ""
    if session.link is None:
        if not session.persistent or not qos:
            return "dropped", "it is offline and QoS 0 does not wait"
        if not session.has_room:
            return "dropped", _full(session)
        return "queued", f"it is offline; {session.queued_messages} messages wait; QoS 0 is dropped{shared}"
    if not session.ready:
        if not qos:
            return "dropped", "its connection does not keep up and QoS 0 does not wait"
        if not session.has_room:
            return "dropped", _full(session)
        return "queued", f"its connection does not keep up; {session.queued_messages} messages wait; QoS 0 is dropped"
    if qos and (session.queue or session.link.room(session) <= 0):
        if not session.has_room:
            return "dropped", _full(session)
        return "queued", f"{session.exchange.messages} are unacknowledged, {session.queued_messages} wait before it"
    if all(each.no_local for each in found):
        return "delivered", f"unless it published it itself: no local{shared}"
    return "delivered", f"QoS {qos} at most{shared}"


def _full(session: Session) -> str:
    budget = session.budget
    if budget.queued_bytes >= budget.limit:
        return f"the queues of all sessions are full: {budget.queued_bytes} of {budget.limit} bytes"
    options = session.options
    return (
        f"its queue is full: {session.queued_messages} of {options.max_queued_messages} messages, "
        f"{session.queued_bytes} of {options.max_queued_bytes} bytes"
    )


def describe_session(broker: Broker, session: Session, *, full: bool = False) -> dict[str, Any]:
    """Return what there is to say about a session, ready for JSON."""
    link = session.link
    now = broker.clock.monotonic()
    facts: dict[str, Any] = {
        "client": session.client_id,
        "connected": link is not None,
        "user": session.username,
        "address": link.address if link is not None else None,
        "version": {3: "3.1", 4: "3.1.1", 5: "5.0"}[link.version] if link is not None else None,
        "subscriptions": len(session.subscriptions),
        "queued": session.queued_messages,
        "inflight": session.exchange.messages,
        "delivered": session.delivered,
        "dropped": sum(session.dropped.values()),
        "expires_in": None if session.expires_at is None else round(session.expires_at - now, 3),
    }
    if full:
        facts["subscriptions"] = [
            {"filter": each.name, "qos": each.qos, "no_local": each.no_local, "identifier": each.identifier or None}
            for each in session.subscriptions.values()
        ]
        facts["dropped"] = dict(session.dropped)
        facts["queued_bytes"] = session.queued_bytes
        facts["unreleased"] = len(session.received)
        facts["will"] = None if session.will is None else session.will.topic
        facts["last_drops"] = [
            {"topic": d.topic, "count": d.count, "reason": d.reason, "seconds_ago": round(now - d.when, 3)}
            for d in session.drops
        ]
    return facts
