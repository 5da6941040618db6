"""Who may publish, subscribe to and receive what: rules of roles, decided without a file or a clock.

A rule allows or denies an action on a filter.  A deny wins over every allow; what no rule mentions falls to the
default.

    publish     the topic of a PUBLISH or of a will          matched by the filter of the rule
    subscribe   the filter of a SUBSCRIBE                    covered by it: all it could match, the rule matches
    receive     the topic of a message on its way out        matched by it

A rule about subscribe is one about receive as well, so a subscription that is wider than a deny still brings nothing
that is denied.  ``%u`` and ``%c`` stand for user name and client id.  Names with ``+ # /`` in them never make an allow
match: a client that calls itself ``#`` gains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

from penstock.errors import OptionsError
from penstock.mqtt.access import Action
from penstock.mqtt.topics import is_filter, split_share

__all__ = ["Acl", "Rule", "covers"]

_ACTIONS: Final[Mapping[str, tuple[Action, ...]]] = {
    "publish": ("publish",),
    "subscribe": ("subscribe", "receive"),
    "receive": ("receive",),
    "all": ("publish", "subscribe", "receive"),
}


class Named(Protocol):
    """The client, as rules see it."""

    @property
    def client_id(self) -> str: ...
    @property
    def username(self) -> str | None: ...


class Rule(msgspec.Struct, frozen=True):
    """One line of a role.

    >>> rule = Rule.parse("publish plant/%u/#", allow=True, source="roles.toml, role device")
    >>> rule.actions, rule.levels
    (('publish',), ('plant', '%u', '#'))
    """

    allow: bool
    actions: tuple[Action, ...]
    levels: tuple[str, ...]
    text: str
    """The rule and where it stands, for people."""
    has_names: bool = False

    @classmethod
    def parse(cls, line: str, *, allow: bool, source: str) -> Rule:
        """Read ``action filter``."""
        action, _, rest = line.strip().partition(" ")
        if action not in _ACTIONS:
            raise OptionsError(f"{source}: {line!r} does not begin with {', '.join(_ACTIONS)}")
        return cls.make(_ACTIONS[action], rest.strip(), allow=allow, source=f"{source}: {line!r}")

    @classmethod
    def make(cls, actions: tuple[Action, ...], filter: str, *, allow: bool, source: str) -> Rule:
        """Check the filter; ``source`` is what people are told."""
        if not is_filter(filter.replace("%u", "u").replace("%c", "c")):
            raise OptionsError(f"{source}: {filter!r} is no filter")
        return cls(
            allow=allow,
            actions=actions,
            levels=tuple(filter.split("/")),
            text=f"{'allow' if allow else 'deny'} by {source}",
            has_names="%u" in filter or "%c" in filter,
        )

    def applies(self, who: Named, levels: Sequence[str], *, is_pattern: bool) -> bool:
        """Whether the rule is about a topic, or, where ``is_pattern``, about all that a filter could match."""
        own: Sequence[str] = self.levels
        if self.has_names:
            replaced = self._with_names(who)
            if replaced is None:
                return False
            own = replaced
        return covers(own, levels) if is_pattern else _matches(own, levels)

    def _with_names(self, who: Named) -> list[str] | None:
        names = {"%u": who.username or "", "%c": who.client_id}
        found = []
        for level in self.levels:
            for mark, name in names.items():
                if mark not in level:
                    continue
                if not name or any(sign in name for sign in "+#/"):
                    if self.allow:
                        return None
                    level = "+"  # a deny may take too much, never too little
                    break
                level = level.replace(mark, name)
            found.append(level)
        return found


class Acl:
    r"""Rules by user; a pure decision.

    >>> from penstock.mqtt.acl_files import parse_roles
    >>> acl = parse_roles('everyone = ["device"]\n[roles.device]\nallow = ["publish plant/%u/#"]')
    >>> class Pump: client_id, username = "c1", "pump"
    >>> acl.allows(Pump, "publish", "plant/pump/rpm"), acl.allows(Pump, "publish", "plant/other/rpm")
    (True, False)
    >>> acl.rule(Pump, "publish", "plant/other/rpm")
    'no rule mentions it; the default is deny'
    """

    def __init__(
        self,
        *,
        of_user: Mapping[str, Sequence[Rule]],
        of_others: Sequence[Rule] = (),
        of_anonymous: Sequence[Rule] = (),
        of_everyone: Sequence[Rule] = (),
        default_allow: bool = False,
        subscribe_always: bool = False,
    ) -> None:
        self._of_user = {name: _by_action([*rules, *of_everyone]) for name, rules in of_user.items()}
        self._of_others = _by_action([*of_others, *of_everyone])
        self._of_anonymous = _by_action([*of_anonymous, *of_everyone])
        self._default_allow = default_allow
        self._subscribe_always = subscribe_always

    def allows(self, who: Named, action: Action, topic: str) -> bool:
        """Whether a client may publish to a topic, subscribe to a filter or receive a topic."""
        return self._decide(who, action, topic)[0]

    def rule(self, who: Named, action: Action, topic: str) -> str:
        """Return which rule decides, in words."""
        return self._decide(who, action, topic)[1]

    def _decide(self, who: Named, action: Action, topic: str) -> tuple[bool, str]:
        if action == "subscribe":
            if self._subscribe_always:
                return True, "allow: mosquitto's rules look at messages, not at subscriptions"
            _, topic = split_share(topic)
        name = who.username
        if name is None:
            rules = self._of_anonymous
        else:
            rules = self._of_user.get(name, self._of_others)
        levels, allowed = topic.split("/"), None
        for rule in rules[action]:  # denies first
            if rule.applies(who, levels, is_pattern=action == "subscribe"):
                if not rule.allow:
                    return False, rule.text
                allowed = rule
                break
        if allowed is not None:
            return True, allowed.text
        default = "allow" if self._default_allow else "deny"
        return self._default_allow, f"no rule mentions it; the default is {default}"


def _by_action(rules: Sequence[Rule]) -> dict[Action, list[Rule]]:
    ordered = sorted(rules, key=lambda rule: rule.allow)
    return {action: [rule for rule in ordered if action in rule.actions] for action in _ACTIONS["all"]}


def _matches(own: Sequence[str], levels: Sequence[str]) -> bool:
    if levels[0][:1] == "$" and own[0] in ("+", "#"):
        return False
    if own[-1] == "#":
        if len(levels) < len(own) - 1:
            return False
        own = own[:-1]
    elif len(own) != len(levels):
        return False
    return all(a in ("+", b) for a, b in zip(own, levels, strict=False))


def covers(own: Sequence[str], levels: Sequence[str]) -> bool:
    """Whether one filter matches everything that another does.

    >>> covers(["a", "#"], ["a", "+", "b"]), covers(["a", "+"], ["a", "#"]), covers(["#"], ["$SYS", "#"])
    (True, False, False)
    """
    if levels[0][:1] == "$" and own[0] in ("+", "#"):
        return False
    for at, level in enumerate(own):
        if level == "#":
            return True
        if at == len(levels):
            return False
        if levels[at] == "#" or (level != "+" and level != levels[at]):
            return False
    # "a" and "a/#" differ by what is below; the loop ends only where both have as many levels.
    return len(own) == len(levels)
