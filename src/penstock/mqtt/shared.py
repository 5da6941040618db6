"""Shared subscriptions: a group takes each message once, one member after the other (MQTT 5, 4.8.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.mqtt.routes import Recipient, Subscription

if TYPE_CHECKING:
    from penstock.mqtt.session import Session

__all__ = ["SharedGroup"]


class SharedGroup:
    """The members of ``$share/<name>/<filter>``, in the order in which they came.

    Turns go strictly round.  A member that cannot take a message now — it is away, its connection does not keep up, its
    queue is full — is passed over while another can; when none can, those take turns that may keep it for later.
    """

    __slots__ = ("_targets", "_turn", "filter", "members", "name")

    def __init__(self, name: str, filter: str) -> None:
        self.name, self.filter = name, filter
        self.members: dict[Session, Subscription] = {}
        self._targets: list[Recipient] = []
        self._turn = 0

    def put(self, subscription: Subscription) -> None:
        """Add a member, or replace its options without touching its turn."""
        target = Recipient([subscription])
        if subscription.session in self.members:
            index = next(i for i, each in enumerate(self._targets) if each.session is subscription.session)
            self._targets[index] = target
        else:
            self._targets.append(target)
        self.members[subscription.session] = subscription

    def remove(self, session: Session) -> None:
        """Take a member away."""
        if self.members.pop(session, None) is None:
            return
        index = next(i for i, each in enumerate(self._targets) if each.session is session)
        del self._targets[index]
        if index < self._turn:
            self._turn -= 1

    def choose(self, count: int, qos: int, allowed: Callable[[Session], bool]) -> list[Recipient]:
        """Return who gets the next ``count`` messages of this QoS, one after the other and round again.

        The turn moves on behind the last of them.
        """
        targets = self._targets
        order = [*range(self._turn, len(targets)), *range(self._turn)]
        able = [index for index in order if targets[index].session.ready and allowed(targets[index].session)]
        if not able:
            able = [
                index
                for index in order
                if min(qos, targets[index].qos) and targets[index].session.has_room and allowed(targets[index].session)
            ]
        if able:
            self._turn = (able[(count - 1) % len(able)] + 1) % len(targets)
        return [targets[index] for index in able]
