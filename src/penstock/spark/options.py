"""What the format ``penstock`` lets you choose: Spark's strings become one frozen dataclass."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from penstock.errors import OptionsError
from penstock.log.detect import FORMATS
from penstock.log.sidecar import CURSOR_NAME
from penstock.spark.filters import TOP, Filters

__all__ = ["SourceOptions"]

FLAGS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
LARGEST_BATCH: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How channels are read by Spark.

    >>> SourceOptions.of({"path": "data", "maxRecordsPerTrigger": "1000"}).max_records
    1000
    """

    paths: tuple[str, ...]
    """``path``, or what was given to ``load``: channels, and folders of channels however deep."""

    # --- What is read

    format: str | None = None
    """``logFormat``: only logs of this format; all formats are found unless it is given."""

    table: str | None = None
    """``table``: read no logs but ``fold`` (stores at and below the paths; a path that is a store needs no option) or
    ``channels`` (the metadata of a channel data directory)."""

    key_prefix: str = ""
    """``keyPrefix``: of a fold, only keys that begin with this."""

    filters: Filters = field(default_factory=Filters)
    """``channels`` and ``kinds``, with commas (or channels as a JSON list), and in batch ``fromPosition`` and
    ``toPosition`` (exclusive): what is read of what is there.  A range of positions reads only its regions."""

    start: str | dict[str, int] = "earliest"
    """``start`` of a stream without a checkpoint: ``earliest``, ``latest``, or JSON of channel name → position.
    Channels that JSON does not name, and channels that appear later, are read from their first record."""

    cursor: str | None = None
    """``cursor``: a named cursor beside each log.  A stream without a checkpoint starts at it, and it follows what
    Spark has made durable, one batch behind."""

    fail_on_data_loss: bool = True
    """``failOnDataLoss``: whether retention that overtook the reader ends it, and damage that a message log steps over.
    When not, the positions that retention took are counted in the offset of the channel, which every progress report
    shows, and damage is logged."""

    # --- How fast

    max_records: int | None = None
    """``maxRecordsPerTrigger``: records in a batch of a stream, shared fairly between channels."""

    max_bytes: int | None = None
    """``maxBytesPerTrigger``: bytes of payload in a batch of a stream; at least one record is read."""

    partition_bytes: int = 128 << 20
    """``partitionBytes``: how much of the logs a task reads.  A task costs about 60 ms, so not too little."""

    partitions: int = field(default_factory=lambda: os.cpu_count() or 1)
    """``partitions``: how many tasks there should be even when each then reads less than partitionBytes."""

    batch_bytes: int = 4 << 20
    """``batchBytes``: payload of one Arrow batch, at most 1g: Spark takes less than 2 GiB."""

    def __post_init__(self) -> None:
        if not self.paths:
            raise OptionsError("no path: give one to load(), a channel or a folder of channels")
        if self.format is not None and self.format not in FORMATS:
            raise OptionsError(f"logFormat={self.format!r}: must be one of {', '.join(FORMATS)}")
        if isinstance(self.start, str) and self.start not in ("earliest", "latest"):
            raise OptionsError(f"start={self.start!r}: must be earliest, latest, or JSON of channel to position")
        if self.cursor is not None and not CURSOR_NAME.fullmatch(self.cursor):
            raise OptionsError(f"cursor={self.cursor!r}: must be 1 to 64 letters, digits, dots, dashes or underscores")
        for option, name, _ in OPTIONS:
            value = getattr(self, name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise OptionsError(f"{option}={value}: must be at least 1")
        if self.batch_bytes > LARGEST_BATCH:
            raise OptionsError(f"batchBytes={self.batch_bytes}: must be at most 1g")

    @classmethod
    def of(cls, options: Mapping[str, str], also: Iterable[str] = ()) -> SourceOptions:
        """Read Spark's options, whose names have no case; one that is neither known nor in ``also`` is refused."""
        found = {name.lower(): value for name, value in options.items()}
        _check_names(found, {*KNOWN, *(name for name, _, _ in OPTIONS), *also})
        paths = _json(list[str], "paths", found["paths"]) if "paths" in found else []
        paths += [found["path"]] if "path" in found else []
        chosen: dict[str, Any] = {"paths": tuple(map(local_path, paths))}
        for option, name, convert in OPTIONS:
            if option.lower() in found:
                chosen[name] = _converted(convert, option, found[option.lower()])
        return cls(**chosen, filters=_filters(found))


def local_path(path: str) -> str:
    """Return a path without the ``file:`` that Spark's users are used to.

    >>> local_path("file:///data/ticks"), local_path("data/ticks/")
    ('/data/ticks', 'data/ticks')
    """
    if path.startswith("file:"):
        path = "/" + path.removeprefix("file:").lstrip("/")
    elif "://" in path:
        raise OptionsError(f"{path}: only local paths are read")
    return path.rstrip("/") or "/"


def _check_names(found: Iterable[str], known: Iterable[str]) -> None:
    names = {name.lower(): name for name in known}
    for option in found:
        if option not in names:
            close = difflib.get_close_matches(option, names, 1)
            hint = f": is it {names[close[0]]}?" if close else f"; there are {', '.join(sorted(names.values()))}"
            raise OptionsError(f"option {option} is not known{hint}")


def _filters(found: Mapping[str, str]) -> Filters:
    def words(option: str) -> list[str]:
        text = found.get(option.lower())
        if text is None:
            return []
        if text.lstrip().startswith("["):  # for names with a comma
            named: list[str] = _json(list[str], option, text)
        else:
            named = [word.strip() for word in text.split(",") if word.strip()]
        if not named:
            raise OptionsError(f"{option}={text!r}: name at least one, or leave the option out")
        return named

    low = _converted(int, "fromPosition", found.get("fromposition", "0"))
    high = _converted(int, "toPosition", found["toposition"]) - 1 if "toposition" in found else TOP
    kinds = [_converted(int, "kinds", word) for word in words("kinds")]
    return Filters(channels=tuple(words("channels")), kinds=tuple(kinds), low=low, high=high)


def _converted(convert: Callable[[str], Any], option: str, text: str) -> Any:
    try:
        return convert(text)
    except (ValueError, KeyError):
        raise OptionsError(f"{option}={text!r} is not understood") from None


def _flag(text: str) -> bool:
    return FLAGS[text.strip().lower()]


def _bytes(text: str) -> int:
    """Read a size: ``4096``, ``64k``, ``128m``, ``1g``."""
    text = text.strip().lower().removesuffix("b")
    shift = {"k": 10, "m": 20, "g": 30}.get(text[-1:], 0)
    return int(text[:-1] if shift else text) << shift


def _start(text: str) -> str | dict[str, int]:
    text = text.strip()
    return _json(dict[str, int], "start", text) if text.startswith("{") else text


OPTIONS: Final[tuple[tuple[str, str, Callable[[str], Any]], ...]] = (
    ("logFormat", "format", str),
    ("table", "table", str),
    ("keyPrefix", "key_prefix", str),
    ("start", "start", _start),
    ("cursor", "cursor", str),
    ("failOnDataLoss", "fail_on_data_loss", _flag),
    ("maxRecordsPerTrigger", "max_records", int),
    ("maxBytesPerTrigger", "max_bytes", _bytes),
    ("partitionBytes", "partition_bytes", _bytes),
    ("partitions", "partitions", int),
    ("batchBytes", "batch_bytes", _bytes),
)
"""What an option is called, the field it becomes, and how its text is read."""
KNOWN: Final = ("path", "paths", "channels", "kinds", "fromPosition", "toPosition")
"""The options that are not read one by one."""


def _json(kind: Any, option: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as exc:
        raise OptionsError(f"{option}={text!r}: {exc}") from None
