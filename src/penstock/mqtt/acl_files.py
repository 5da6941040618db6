"""Files of rules: ours (TOML, roles) and mosquitto's, and what reloads them.

    default = "deny"                 what no rule mentions: "deny" or "allow"
    everyone = ["device"]            roles of every client, anonymous ones too
    anonymous = []                   roles of clients without a name
    others = []                      roles of users that are not listed

    [users]
    ann = ["operator"]

    [roles.operator]
    allow = ["all plant/#", "subscribe $SYS/#"]
    deny = ["publish plant/+/firmware"]

    [roles.device]
    allow = ["publish plant/%u/#", "subscribe commands/%c/#"]

mosquitto's lines are `user NAME`, `topic [read|write|readwrite|deny] FILTER` and `pattern …`; what it does with them is
done here: what is not mentioned is denied, deny wins, subscriptions are accepted and messages are filtered on their
way out.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.disk.plain import parse_toml, read_small
from penstock.errors import OptionsError
from penstock.mqtt.access import Action
from penstock.mqtt.acl import Acl, Named, Rule

__all__ = ["AclFile", "parse_mosquitto", "parse_roles"]

_log = logging.getLogger(__name__)


class _Role(msgspec.Struct, forbid_unknown_fields=True):
    allow: list[str] = []
    deny: list[str] = []


class _Roles(msgspec.Struct, forbid_unknown_fields=True):
    default: Literal["allow", "deny"] = "deny"
    everyone: list[str] = []
    anonymous: list[str] = []
    others: list[str] = []
    users: dict[str, list[str]] = {}
    roles: dict[str, _Role] = {}


def parse_roles(text: str, source: str = "acl") -> Acl:
    r"""Read our own form.

    >>> parse_roles('[roles.a]\nallow = ["fly x"]')
    Traceback (most recent call last):
    penstock.errors.OptionsError: acl, role a: 'fly x' does not begin with publish, subscribe, receive, all
    """
    try:
        read = msgspec.convert(parse_toml(text, source), _Roles)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as exc:
        raise OptionsError(f"{source}: {exc}") from exc
    rules: dict[str, list[Rule]] = {}
    for name, role in read.roles.items():
        where = f"{source}, role {name}"
        rules[name] = [Rule.parse(line, allow=False, source=where) for line in role.deny]
        rules[name] += [Rule.parse(line, allow=True, source=where) for line in role.allow]

    def of(roles: Sequence[str], whose: str) -> list[Rule]:
        for role in roles:
            if role not in rules:
                raise OptionsError(f"{source}: {whose} has the role {role!r}, which is not there")
        return [rule for role in roles for rule in rules[role]]

    return Acl(
        of_user={name: of(roles, f"user {name}") for name, roles in read.users.items()},
        of_others=of(read.others, "others"),
        of_anonymous=of(read.anonymous, "anonymous"),
        of_everyone=of(read.everyone, "everyone"),
        default_allow=read.default == "allow",
    )


_ACCESS: dict[str, tuple[bool, tuple[Action, ...]]] = {
    "read": (True, ("receive",)),
    "write": (True, ("publish",)),
    "readwrite": (True, ("publish", "receive")),
    "deny": (False, ("publish", "receive")),
}


def parse_mosquitto(text: str, source: str = "acl") -> Acl:
    r"""Read mosquitto's form.

    >>> class Ann: client_id, username = "c", "ann"
    >>> acl = parse_mosquitto("user ann\ntopic read plant/#\npattern write out/%u")
    >>> [acl.allows(Ann, *asked) for asked in (("receive", "plant/7"), ("publish", "plant/7"), ("publish", "out/ann"))]
    [True, False, True]
    >>> acl.rule(Ann, "receive", "plant/7")
    "allow by acl line 2: 'topic read plant/#'"
    """
    of_user: dict[str, list[Rule]] = {}
    anonymous: list[Rule] = []
    patterns: list[Rule] = []
    current = anonymous
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        where = f"{source} line {number}"
        if word == "user" and rest:
            current = of_user.setdefault(rest, [])
        elif word in ("topic", "pattern") and rest:
            access, _, wanted = rest.partition(" ")
            if access not in _ACCESS or not wanted:
                access, wanted = "readwrite", rest
            allow, actions = _ACCESS[access]
            rule = Rule.make(actions, wanted.strip(), allow=allow, source=f"{where}: {line!r}")
            if word == "pattern":
                patterns.append(rule)
            else:
                # Only patterns know %u and %c; elsewhere they are text like any other.
                current.append(msgspec.structs.replace(rule, has_names=False))
        else:
            raise OptionsError(f"{where}: {line!r} is no line of a mosquitto ACL file")
    return Acl(of_user=of_user, of_anonymous=anonymous, of_everyone=patterns, subscribe_always=True)


class AclFile:
    """A file of rules that is read again on request; a bad one changes nothing.

    A name that ends in ``.toml`` is our form, every other mosquitto's.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.problem: str | None = None
        """Why the last reload kept the old rules."""
        self.current = self._load()

    def _load(self) -> Acl:
        try:
            text = read_small(self.path).decode()
        except (OSError, UnicodeDecodeError) as exc:
            raise OptionsError(f"{self.path}: {getattr(exc, 'strerror', None) or exc}") from exc
        return parse_roles(text, self.path) if self.path.endswith(".toml") else parse_mosquitto(text, self.path)

    def reload(self) -> str | None:
        """Read the file again; return None when its rules count from now on, else why the old ones still do."""
        try:
            self.current = self._load()
            self.problem = None
        except OptionsError as exc:
            self.problem = str(exc)
            _log.error("the rules were NOT replaced, the old ones still count: %s", exc)
        return self.problem

    def allows(self, who: Named, action: Action, topic: str) -> bool:
        """Whether a client may do it, by the rules that count now."""
        return self.current.allows(who, action, topic)

    def rule(self, who: Named, action: Action, topic: str) -> str:
        """Return which rule decides, in words."""
        return self.current.rule(who, action, topic)
