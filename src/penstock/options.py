"""One way to give options: as keywords, checked, or as the options object they make.

FileChannel.open("jobs", sync="always", keep_bytes=1 << 30)
FileChannel.open("jobs", ChannelOptions(sync="always", keep_bytes=1 << 30))
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import linecache
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from penstock.errors import OptionsError

__all__ = ["options_from", "shows_options", "option_texts"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_DESCRIBED: Final[dict[type[Any], str]] = {}
PLAIN: Final = frozenset({bool, int, float, str, bytes, type(None)})


def options_from(kind: type[T], options: T | None, given: Mapping[str, Any]) -> T:
    """Return the options object, or make one of keywords; a name that does not exist is refused with the nearest one.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Options:
    ...     sync: str = "none"
    >>> options_from(Options, None, {"sync": "always"})
    Options(sync='always')
    >>> options_from(Options, None, {"snyc": "always"})
    Traceback (most recent call last):
    penstock.errors.OptionsError: snyc: there is no such option; did you mean sync?
    >>> options_from(Options, None, {"sync": 1})
    Traceback (most recent call last):
    penstock.errors.OptionsError: sync=1: Expected `str`, got `int`
    """
    if options is not None:
        if given:
            raise OptionsError(f"{next(iter(given))}: give options as keywords or as one object, not both")
        if not isinstance(options, kind):
            raise OptionsError(f"options are of type {kind.__name__}, not {type(options).__name__}")
        return options
    known = [field.name for field in _fields(kind)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise OptionsError(f"{name}: there is no such option; {hint}")
    if issubclass(kind, msgspec.Struct):
        return _converted(kind, given)
    _check_types(kind, given)
    return kind(**given)


def _check_types(kind: type[Any], given: Mapping[str, Any]) -> None:
    """Refuse a value whose type is not the one its field of a dataclass names."""
    types = _plain_types(kind)  # type: ignore[arg-type]  # a class can be hashed
    for name, value in given.items():
        plain = value.item() if type(value).__module__ == "numpy" else value  # a number out of an array
        try:
            msgspec.convert(plain, types.get(name, Any))
        except msgspec.ValidationError as exc:
            raise OptionsError(f"{name}={value!r}: {exc}") from None


@functools.cache
def _plain_types(kind: type[Any]) -> dict[str, Any]:
    """Return the types of fields that are numbers, texts or bytes; the class looks at others."""
    try:
        known = typing.get_type_hints(kind)
    except NameError:  # a name that only type checkers import
        return {}
    return {name: type_ for name, type_ in known.items() if {*(typing.get_args(type_) or (type_,))} <= PLAIN}


def _converted(kind: type[T], given: Mapping[str, Any]) -> T:
    """Return a struct of values whose types were checked."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as exc:
        cause = exc.__cause__
        raise OptionsError(str(cause if isinstance(cause, OptionsError) else exc)) from None
    except TypeError:  # a type that msgspec does not look at, as str | bytes
        return kind(**given)


def _fields(kind: type[Any]) -> list[_Field]:
    """Return the options of a dataclass or a struct."""
    if issubclass(kind, msgspec.Struct):
        return [_Field(field.name, field.default, field.type) for field in msgspec.structs.fields(kind)]
    return [_Field(field.name, field.default, field.type) for field in dataclasses.fields(kind)]


@dataclasses.dataclass(frozen=True)
class _Field:
    name: str
    default: Any
    type: Any

    def parameter(self) -> inspect.Parameter:
        """Return it as an argument of a function."""
        missing = self.default is dataclasses.MISSING or self.default is msgspec.NODEFAULT
        default = inspect.Parameter.empty if missing else self.default
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=self.type)


def shows_options(kind: type[Any]) -> Callable[[F], F]:
    """Let ``help()`` of a function that takes ``**given`` show every option of ``kind``: its default, and what it does.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Options:
    ...     sync: str = "none"
    >>> @shows_options(Options)
    ... def open(path: str, **given: Any) -> None: ...
    >>> inspect.signature(open)
    <Signature (path: 'str', *, sync: 'str' = 'none') -> 'None'>
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        kept = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        fields = [field.parameter() for field in _fields(kind) if field.name not in signature.parameters]
        function.__signature__ = signature.replace(parameters=[*kept, *fields])  # type: ignore[attr-defined]
        told = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = f"{told}\n\nOptions, as of {kind.__name__}:\n\n{_described(kind)}".strip()
        return function

    return decorate


def _described(kind: type[Any]) -> str:
    """Return the options of ``kind`` for people: a line each with the default, and below it what the option does."""
    if kind in _DESCRIBED:
        return _DESCRIBED[kind]
    texts, lines = option_texts(kind), []
    for field in _fields(kind):
        lines.append(str(field.parameter()))
        lines += textwrap.wrap(texts.get(field.name, ""), 100, initial_indent="    ", subsequent_indent="    ")
    return _DESCRIBED.setdefault(kind, "\n".join(lines))


def option_texts(kind: type[Any]) -> dict[str, str]:
    """Return what stands below each option in its class; nothing where there are no sources.

    >>> from penstock.log.xchannel import WriterOptions
    >>> option_texts(WriterOptions)["keep_files"][:26]
    'How many files stay after '
    """
    source = getattr(sys.modules.get(kind.__module__), "__file__", None)
    text = "".join(linecache.getlines(source)) if source else ""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            for field, told in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(told, ast.Expr):
                    name, value = field.target, told.value
                    if isinstance(name, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                        found[name.id] = " ".join(inspect.cleandoc(value.value).split())
    return found
