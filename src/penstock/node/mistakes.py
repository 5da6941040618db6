"""A configuration is checked as a whole: every mistake with its line, and the nearest name for one that does not exist.

Values come from a TOML file, then from the environment (``PENSTOCK__MQTT__PORT=1884`` is ``port`` in ``[mqtt]``);
``${NAME}`` in a string is a variable of the environment.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from penstock.disk.plain import parse_toml
from penstock.errors import OptionsError
from penstock.shown import SURROGATE

__all__ = ["CrossedError", "Mistake", "read_table", "check_table", "dotted"]

PREFIX: Final = "PENSTOCK__"
HEADER: Final = re.compile(r"\s*(\[\[?)\s*([^\]#]+?)\s*\]\]?\s*(?:#.*)?$")
ASSIGNMENT: Final = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
VARIABLE: Final = re.compile(r"\$\{(\w+)\}")
SYNTAX_LINE: Final = re.compile(r"\(at line (\d+), column \d+\)")

Path = tuple[str | int, ...]


class Mistake(msgspec.Struct, frozen=True, order=True):
    """What is wrong, and where: a line of the file, or the environment (line 0).

    >>> str(Mistake(3, "mqtt.prot", "there is no such key; did you mean port?"))
    'line 3: mqtt.prot: there is no such key; did you mean port?'
    """

    line: int
    key: str
    reason: str

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        return f"{place}{self.key}: {self.reason}" if self.key else f"{place}{self.reason}"


def dotted(path: Path) -> str:
    """Return a path as people write it.

    >>> dotted(("tap", 1, "filter"))
    'tap[1].filter'
    """
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


class CrossedError(OptionsError):
    """Two tables that do not go together: the key that is blamed, and the tables that must be right for it to be so.

    >>> str(CrossedError(("export", 0, "fold"), ("fold", "export"), "there is no such fold"))
    'export[0].fold: there is no such fold'
    """

    def __init__(self, path: Path, tables: tuple[str, ...], reason: str) -> None:
        super().__init__(path, tables, reason)
        self.path, self.tables, self.reason = path, tables, reason

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.reason}"


class ConfigTable:
    """The values of a configuration, the line each stands on, and which come from the environment."""

    def __init__(self, values: dict[str, Any], lines: dict[Path, int]) -> None:
        self.values, self._lines = values, lines
        self.variables: dict[Path, str] = {}

    def mistake(self, path: Path, reason: str) -> Mistake:
        """Return a mistake of a key: on its line, or of the variable that it comes from."""
        variable = self.variables.get(path)
        return Mistake(self.line(path), dotted(path), reason) if variable is None else Mistake(0, variable, reason)

    def line(self, path: Path) -> int:
        """Return where a key stands, or the nearest table around it; 0 when the file does not have it."""
        while path:
            if path in self._lines:
                return self._lines[path]
            path = path[:-1]
        return 0


def read_table(text: str, environment: Mapping[str, str]) -> tuple[ConfigTable, list[Mistake]]:
    r"""Return the values of a file and the environment, and what is wrong with their form.

    >>> table, mistakes = read_table("[mqtt]\nport = 1883\n", {"PENSTOCK__MQTT__PORT": "1884"})
    >>> table.values, table.line(("mqtt", "port")), mistakes
    ({'mqtt': {'port': 1884}}, 2, [])
    """
    text = text.removeprefix("\ufeff")  # some editors begin a file with it
    try:
        values = parse_toml(text, "")
    except OptionsError as exc:
        return ConfigTable({}, {}), [Mistake(1, "", str(exc).removeprefix(": "))]
    except tomllib.TOMLDecodeError as exc:
        found = SYNTAX_LINE.search(str(exc))
        line = int(found[1]) if found else text.count("\n") + 1
        twice = _given_twice(text) if "overwrite" in str(exc) else None
        return ConfigTable({}, {}), [twice or Mistake(line, "", SYNTAX_LINE.sub("", str(exc)).strip())]
    mistakes: list[Mistake] = []
    table = ConfigTable(values, _lines_of(text))
    for name, value in sorted(environment.items()):
        if name.startswith(PREFIX):
            names = [part.lower() for part in name[len(PREFIX) :].split("__")]
            problem = _override(values, names, value)
            table.variables[tuple(names)] = name
            if problem:
                mistakes.append(Mistake(0, name, problem))
    _expand(values, (), environment, table, mistakes)
    return table, mistakes


def check_table(table: ConfigTable, kind: type[msgspec.Struct]) -> list[Mistake]:
    """Return everything that keeps the values from being a ``kind``.

    >>> class Options(msgspec.Struct): port: int = 1
    >>> table, _ = read_table("prot = 2", {})
    >>> [str(mistake) for mistake in check_table(table, Options)]
    ['line 1: prot: there is no such key; did you mean port?']
    """
    mistakes: list[Mistake] = []
    _check_struct(table, (), table.values, kind, mistakes)
    return sorted(mistakes)


def _check_struct(table: ConfigTable, path: Path, value: Any, kind: Any, mistakes: list[Mistake]) -> None:
    if not isinstance(value, dict):
        mistakes.append(table.mistake(path, f"must be a table, not {_kind_of(value)}"))
        return
    hints = get_type_hints(kind)
    good: dict[str, Any] = {}
    for name in value:
        here, before = (*path, name), len(mistakes)
        if name not in kind.__struct_fields__:
            near = difflib.get_close_matches(name, kind.__struct_fields__, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(kind.__struct_fields__)}"
            mistakes.append(table.mistake(here, f"there is no such key; {hint}"))
        else:
            _check_value(table, here, value[name], hints[name], mistakes)
        if len(mistakes) == before:
            good[name] = value[name]
    required = [field.name for field in msgspec.structs.fields(kind) if field.required and field.name not in good]
    mistakes += [
        Mistake(table.line(path), dotted((*path, name)), "must be given") for name in required if name not in value
    ]
    while not required:
        try:
            msgspec.convert(good, kind)  # what its own checks say of the keys that have no other mistake
            return
        except (msgspec.ValidationError, OptionsError) as exc:
            crossed = exc.__cause__
            if isinstance(crossed, CrossedError):
                key = str(crossed.path[0])
                if all(name in good or name not in value for name in crossed.tables):
                    mistakes.append(table.mistake((*path, *crossed.path), crossed.reason))
            else:
                key = _add_refusal(table, path, value, str(exc), mistakes)
        if key not in good or any(field.name == key and field.required for field in msgspec.structs.fields(kind)):
            return
        del good[key]  # and what they say of the others


def _check_value(table: ConfigTable, path: Path, value: Any, hint: Any, mistakes: list[Mistake]) -> None:
    if isinstance(value, str) and SURROGATE.search(value):  # of the environment or a command line
        mistakes.append(table.mistake(path, "must be UTF-8"))
        return
    structs = [one for one in _choices(hint) if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    if structs and isinstance(value, dict):
        _check_struct(table, path, value, structs[0], mistakes)
        return
    for one in _choices(hint):
        inner = get_args(one)
        if get_origin(one) in (list, tuple) and isinstance(value, list) and _is_struct(inner[0]):
            for index, item in enumerate(value):
                _check_struct(table, (*path, index), item, inner[0], mistakes)
            return
        if get_origin(one) is dict and isinstance(value, dict) and _is_struct(inner[1]):
            for name, item in value.items():
                _check_struct(table, (*path, name), item, inner[1], mistakes)
            return
        if get_origin(one) is dict and isinstance(value, dict) and inner[1] is not Any:
            for name, item in value.items():
                _check_value(table, (*path, name), item, inner[1], mistakes)
            return
    try:
        msgspec.convert(value, hint)
    except (msgspec.ValidationError, OptionsError) as exc:
        mistakes.append(table.mistake(path, _plain(str(exc), value, hint)))


def _add_refusal(table: ConfigTable, path: Path, value: dict[str, Any], reason: str, mistakes: list[Mistake]) -> str:
    """Note what the options said when they were made, which begins with a key (``key=value: …`` or ``key: …``).

    Return the key, if it is one of the table.
    """
    reason = reason.partition(" - at `$")[0]
    named = re.match(r"(\w+)(=|: )", reason)
    if named is None or named[1] not in value:
        mistakes.append(table.mistake(path, reason))
        return ""
    here = (*path, named[1])
    mistakes.append(table.mistake(here, reason.removeprefix(f"{named[1]}: ")))
    return named[1]


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


KINDS: Final = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list", tuple: "a list",
    dict: "a table",
}  # fmt: skip


def _plain(reason: str, value: Any, hint: Any) -> str:
    """Return what a key must be, as people say it; otherwise what the library says.

    >>> _plain("", "x", int | None), _plain("Invalid enum value 'x'", "x", Literal["a", "b"])
    ('must be a whole number, not text', "must be a or b, not 'x'")
    """
    choices = [one for one in _choices(hint) if one is not type(None)]
    if choices and all(get_origin(one) is Literal for one in choices):
        names = [str(name) for one in choices for name in get_args(one)]
        return f"must be {' or '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}, not {value!r}"
    kinds = [get_origin(one) or one for one in choices]
    wanted = ["a table" if _is_struct(one) else KINDS.get(one, "") for one in kinds]
    if all(wanted) and not any(type(value) is one for one in kinds):
        return f"must be {' or '.join(dict.fromkeys(wanted))}, not {_kind_of(value)}"
    reason = reason.partition(" - at `$")[0]
    return f"{reason}, not {value!r}" if reason.startswith("Expected") and ", got" not in reason else reason


def _kind_of(value: Any) -> str:
    return KINDS.get(type(value), type(value).__name__)


def _lines_of(text: str) -> dict[Path, int]:
    """Return the line of each table and key.  A key inside an inline table or a long text is on its table's line."""
    lines: dict[Path, int] = {}
    counts: dict[tuple[str, ...], int] = {}
    here: Path = ()
    for number, line in enumerate(text.split("\n"), 1):
        if found := HEADER.match(line):
            names = _parts(found[2])
            here = ()
            for depth, name in enumerate(names, 1):
                here = (*here, name)
                last = depth == len(names)
                if found[1] == "[[" and last:
                    counts[names] = counts.get(names, -1) + 1
                    lines.setdefault(here, number)
                    here = (*here, counts[names])
                elif names[:depth] in counts:
                    here = (*here, counts[names[:depth]])
            lines.setdefault(here, number)
        elif found := ASSIGNMENT.match(line):
            path = here
            for name in _parts(found[1]):
                path = (*path, name)
                lines.setdefault(path, number)
    return lines


def _given_twice(text: str) -> Mistake | None:
    """Return the key that stands twice in one table."""
    seen: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if HEADER.match(line):
            seen = {}
        elif found := ASSIGNMENT.match(line):
            key = _parts(found[1])
            if key in seen:
                return Mistake(number, ".".join(key), f"stands twice; the first is on line {seen[key]}")
            seen[key] = number
    return None


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in re.findall(r"""[\w-]+|"[^"]*"|'[^']*'""", text))


def _override(values: dict[str, Any], names: list[str], text: str) -> str:
    """Put a value of the environment in its place; return what is wrong with it."""
    if not all(names):
        return "an empty name; tables and keys are joined by two underscores"
    for name in names[:-1]:
        inner = values.setdefault(name, {})
        if not isinstance(inner, dict):
            return f"{name} is a value, not a table"
        values = inner
    try:
        value = parse_toml(f"value = {text}", "")["value"]
    except (OptionsError, tomllib.TOMLDecodeError):
        value = text  # most values need no quotes here
    values[names[-1]] = value
    return ""


def _expand(
    values: Any, path: Path, environment: Mapping[str, str], table: ConfigTable, mistakes: list[Mistake]
) -> None:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for name, value in list(items):
        here = (*path, name)
        if isinstance(value, str):
            names = VARIABLE.findall(value)
            missing = [one for one in names if one not in environment]
            if missing:
                mistakes.append(table.mistake(here, f"{missing[0]} is not set in the environment"))
            elif "${" in VARIABLE.sub("", value):  # it would be taken as it stands, and be a secret that all can read
                mistakes.append(table.mistake(here, "${ without a variable: write ${NAME}, of letters, digits and _"))
            elif names and not VARIABLE.sub(lambda found: environment[found[1]], value):
                mistakes.append(table.mistake(here, f"{names[0]} is empty in the environment"))
            else:
                values[name] = VARIABLE.sub(lambda found: environment[found[1]], value)
        elif isinstance(value, dict | list):
            _expand(value, here, environment, table, mistakes)
