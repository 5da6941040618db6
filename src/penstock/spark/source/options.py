"""What the format ``penstock`` lets you choose: Spark's strings become one frozen dataclass."""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from penstock.disk import is_url
from penstock.disk.objectstore import split_url
from penstock.errors import OptionsError, UnsupportedError
from penstock.log.detect import FORMATS
from penstock.log.sidecar import CURSOR_NAME
from penstock.spark.source.filters import TOP, Filters
from penstock.spark.source.names import check_names

__all__ = ["SourceOptions", "absolute_path", "is_remote", "local_path", "path_here", "place_of"]

FLAGS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
LARGEST_BATCH: Final = 1 << 30
LARGEST: Final = (1 << 63) - 1
"""Spark's largest number."""
LAST_NS: Final = (1 << 64) - 1
"""The last time that a log can have: a bound behind it lets every record pass, or none, as it should."""
MOST_KINDS: Final = 1 << 16
WORDS: Final = ("earliest", "latest")

Where = str | dict[str, int | str]
"""A word for all channels, or a position or a word for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How channels are read by Spark.

    >>> SourceOptions.of({"path": "data", "maxRecordsPerTrigger": "1000"}).max_records
    1000
    """

    paths: tuple[str, ...]
    """``path``, or what was given to ``load``: channels, and folders of channels however deep.  By URL, and in folders
    to which logs were shipped: shipped logs, where a part of the path may have ``*`` in it."""

    # --- What is read

    format: str | None = None
    """``logFormat``: only logs of this format; all formats are found unless it is given."""

    table: str | None = None
    """``table``: read no logs but ``fold`` (stores at and below the paths; a path that is a store needs no option),
    ``artifact`` (published ones by URL; the folder of one needs no option) or ``channels`` (the metadata of a channel
    data directory)."""

    key_prefix: str = ""
    """``keyPrefix``: of a fold, only keys that begin with this."""

    filters: Filters = field(default_factory=Filters)
    """``channels``, ``nodes`` and ``kinds``, with commas (or as a JSON list), ``fromTime`` and ``toTime`` (exclusive;
    ISO 8601 or ns since 1970), and in batch ``fromPosition`` and ``toPosition`` (exclusive): what is read of what is
    there.  A range of positions reads only its regions; of shipped logs, whole segments are left out by all of them."""

    start: Where = "earliest"
    """``startingOffsets`` (of a stream also ``start``), of a batch, or of a stream without a checkpoint: ``earliest``,
    ``latest``, or JSON of channel name → position, or one of these words, or -2 and -1 for them.  Channels that JSON
    does not name, and channels that appear later, are read from their first record."""

    end: Where = "latest"
    """``endingOffsets``: where reading ends, exclusive, in the same form.  A stream stays there."""

    start_ns: int | None = None
    """``startingTimestamp``: begin with the first record that is not older: ISO 8601, or milliseconds since 1970."""

    end_ns: int | None = None
    """``endingTimestamp``: end before the first record that is not older."""

    cursor: str | None = None
    """``cursor``: a named cursor beside each log.  A stream without a checkpoint starts at it, and it follows what
    Spark has made durable, one batch behind."""

    fail_on_data_loss: bool = True
    """``failOnDataLoss``: whether retention that overtook the reader ends it, and damage that a message log steps over.
    When not, what is lost is counted in the offset of the channel, which every progress report shows."""

    # --- How fast

    max_records: int | None = None
    """``maxRecordsPerTrigger`` (or ``maxOffsetsPerTrigger``): records in a batch of a stream, shared fairly between
    channels."""

    min_records: int | None = None
    """``minOffsetsPerTrigger``: a stream makes no batch of fewer records, unless ``maxTriggerDelay`` is over."""

    max_delay_seconds: float = 900.0
    """``maxTriggerDelay``: how long records wait for more of them (``500ms``, ``10s``, ``15m``, ``1h``)."""

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
            raise OptionsError(
                "no path: give one to load(), a channel or a folder of channels; CREATE TABLE … USING penstock OPTIONS "
                "(path …) without columns, for Spark tells no options of a table that was made with them"
            )
        if self.format is not None and self.format not in FORMATS:
            raise OptionsError(f"logFormat={self.format!r}: must be one of {', '.join(FORMATS)}")
        for option, where in (("startingOffsets", self.start), ("endingOffsets", self.end)):
            if isinstance(where, str) and where not in WORDS:
                raise OptionsError(f"{option}={where!r}: must be earliest, latest, or JSON of channel to position")
        if self.end == "earliest":
            raise OptionsError("endingOffsets='earliest': nothing would be read")
        if self.cursor is not None and not CURSOR_NAME.fullmatch(self.cursor):
            raise OptionsError(f"cursor={self.cursor!r}: must be 1 to 64 letters, digits, dots, dashes or underscores")
        for option, name, _ in OPTIONS:
            value = getattr(self, name)
            if name not in PLACES and isinstance(value, int) and not isinstance(value, bool):
                if value < 1:
                    raise OptionsError(f"{option}={value}: must be at least 1")
                if value > LARGEST:
                    raise OptionsError(f"{option}={value}: must be at most {LARGEST}")
        if self.batch_bytes > LARGEST_BATCH:
            raise OptionsError(f"batchBytes={self.batch_bytes}: must be at most 1g")
        self._check_order()

    def _check_order(self) -> None:
        """Refuse an end before its begin: nothing would be read, whatever there is."""
        filters = self.filters
        for begin, end, names in (
            (self.start_ns, self.end_ns, ("startingTimestamp", "endingTimestamp")),
            (filters.since_ns, filters.until_ns, ("fromTime", "toTime")),
            (filters.low, filters.high + 1, ("fromPosition", "toPosition")),
        ):
            if begin is not None and end is not None and begin > end:
                raise OptionsError(f"{names[1]} is before {names[0]}: nothing would be read")
        if isinstance(self.start, dict) and isinstance(self.end, dict):
            for name in self.start.keys() & self.end.keys():
                first, last = self.start[name], self.end[name]
                if isinstance(first, int) and isinstance(last, int) and first > last >= 0:
                    raise OptionsError(f"endingOffsets: {name} would end at {last}, before it begins at {first}")
        if self.min_records is not None and self.max_records is not None and self.min_records > self.max_records:
            raise OptionsError(
                f"minOffsetsPerTrigger={self.min_records} is more than {self.max_records} a batch may have"
            )

    @classmethod
    def of(cls, options: Mapping[str, str], also: Iterable[str] = ()) -> SourceOptions:
        """Read Spark's options, whose names have no case; one that is neither known nor in ``also`` is refused."""
        found = {name.lower(): value for name, value in options.items()}
        check_names(found, {*KNOWN, *(name for name, _, _ in OPTIONS), *also})
        paths = _json(list[str], "paths", found["paths"]) if "paths" in found else []
        paths += [found["path"]] if "path" in found else []
        chosen: dict[str, Any] = {"paths": tuple(map(absolute_path, paths))}
        said: dict[str, str] = {}
        for option, name, convert in OPTIONS:
            if option.lower() in found:
                place = PLACES.get(name, name)
                if place in said:
                    raise OptionsError(f"{said[place]} and {option} say the same: give one of them")
                said[place], chosen[name] = option, _converted(convert, option, found[option.lower()])
        return cls(**chosen, filters=_filters(found))


def local_path(path: str) -> str:
    """Return a path without the ``file:`` that Spark's users are used to.

    >>> local_path("file:///data/ticks"), local_path("data/ticks/"), local_path("file:data/ticks")
    ('/data/ticks', 'data/ticks', 'data/ticks')
    """
    if path.startswith("file:"):
        path = path.removeprefix("file:")
        path = "/" + path.lstrip("/") if path.startswith("/") else path
    elif "://" in path:
        raise OptionsError(f"{path}: only a path of this machine will do here")
    if not path:
        raise OptionsError("an empty path: / is what stands for everything")
    return path.rstrip("/") or "/"


def is_remote(place: str) -> bool:
    """Whether a place is on an object store.

    >>> is_remote("s3://lake/raw"), is_remote("lake/raw"), is_remote("file:///lake/raw")
    (True, False, False)
    """
    return is_url(place) and not place.startswith("file:")


def place_of(path: str) -> str:
    """Return a path as ``local_path`` does, and the URL of an object store as it is.

    >>> place_of("s3://bucket/fleet/"), place_of("file:///data/ticks")
    ('s3://bucket/fleet', '/data/ticks')
    """
    if not is_remote(path):
        return local_path(path)
    try:
        split_url(path)
    except UnsupportedError as exc:
        raise OptionsError(str(exc)) from None
    if "@" in path.partition("://")[2].partition("/")[0] and not path.startswith("abfs"):
        raise OptionsError("a URL with a name or password in it: credentials come from the environment")
    return path.rstrip("/")


def absolute_path(path: str) -> str:
    """Return a place that means the same in every process: tasks run in folders of their own.

    >>> absolute_path("/data/./ticks/"), absolute_path("file:/data/*/ticks"), absolute_path("s3://bucket/a/")
    ('/data/ticks', '/data/*/ticks', 's3://bucket/a')
    """
    return place_of(path) if is_remote(path) else os.path.abspath(local_path(path))


def path_here(spark: object, path: str) -> str:
    """Return a path as this process means it: Java may have begun in another folder; Connect is another machine.

    >>> path_here(object(), "data/ticks")
    'data/ticks'
    """
    return absolute_path(path) if hasattr(spark, "_jsparkSession") else path


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
    kinds = [_converted(_kind, "kinds", word) for word in words("kinds")]
    pattern = found.get("channelpattern", "")
    try:
        re.compile(pattern)
    except re.error as exc:
        raise OptionsError(f"channelPattern={pattern!r}: {exc}") from None
    return Filters(
        channels=tuple(words("channels")),
        pattern=pattern,
        kinds=tuple(kinds),
        low=low,
        high=high,
        nodes=tuple(words("nodes")),
        since_ns=_converted(_time_ns, "fromTime", found["fromtime"]) if "fromtime" in found else None,
        until_ns=_converted(_time_ns, "toTime", found["totime"]) if "totime" in found else None,
    )


def _kind(text: str) -> int:
    kind = int(text)
    if not 0 <= kind < MOST_KINDS:
        raise OptionsError(f"{kind} is no kind: they are 0 to {MOST_KINDS - 1}")
    return kind


def _time_ns(text: str) -> int:
    """Read a time: ns since 1970, or ISO 8601, which is UTC unless it says otherwise.

    >>> _time_ns("1970-01-01T00:00:01"), _time_ns("17")
    (1000000000, 17)
    """
    text = text.strip()
    if text.lstrip("-").isdigit():
        return min(int(text), LAST_NS)
    moment = dt.datetime.fromisoformat(text)
    moment = moment.replace(tzinfo=dt.UTC) if moment.tzinfo is None else moment
    return min((moment - dt.datetime.fromtimestamp(0, dt.UTC)) // dt.timedelta(microseconds=1) * 1000, LAST_NS)


def _converted(convert: Callable[[str], Any], option: str, text: str) -> Any:
    try:
        return convert(text)
    except OptionsError as exc:
        raise OptionsError(f"{option}: {exc}") from None
    except (ValueError, KeyError):
        raise OptionsError(f"{option}={text!r} is not understood") from None


def _flag(text: str) -> bool:
    return FLAGS[text.strip().lower()]


def _bytes(text: str) -> int:
    """Read a size: ``4096``, ``64k``, ``128m``, ``1g``."""
    text = text.strip().lower().removesuffix("b")
    shift = {"k": 10, "m": 20, "g": 30}.get(text[-1:], 0)
    return int(text[:-1] if shift else text) << shift


def size_of(option: str, text: str) -> int:
    """Read an option that is a size.

    >>> size_of("maxMessageBytes", "8m")
    8388608
    """
    size: int = _converted(_bytes, option, text)
    if size < 1:
        raise OptionsError(f"{option}={size}: must be at least 1")
    return size


def _where(text: str) -> Where:
    text = text.strip()
    if not text.startswith("{"):
        return text.lower()
    places: dict[str, int | str] = _json(dict[str, int | str], "positions", text)
    for name, at in places.items():
        if isinstance(at, str) and at not in WORDS:
            raise OptionsError(f"{at!r} of {name}: must be a position, earliest or latest")
        places[name] = {-2: "earliest", -1: "latest"}.get(at, at) if isinstance(at, int) else at
    return places


def moment_ns(text: str) -> int:
    """Read a time: ISO 8601, of UTC where it names no zone, or milliseconds since 1970 as Kafka has them.

    >>> moment_ns("1970-01-01T00:00:01.5Z"), moment_ns("1500"), moment_ns("1970-01-01 00:00:01.5")
    (1500000000, 1500000000, 1500000000)
    """
    if text.strip().isdigit():
        return min(int(text) * 1_000_000, LAST_NS)
    moment = dt.datetime.fromisoformat(text.strip())
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
    since = moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    return min(max((since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1000, 0), LAST_NS)


def _seconds(text: str) -> float:
    """Read a length of time: ``500ms``, ``10s``, ``15m``, ``1h``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h)\s*", text.lower())
    if found is None:
        raise ValueError(text)
    return float(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[found[2]]


OPTIONS: Final[tuple[tuple[str, str, Callable[[str], Any]], ...]] = (
    ("logFormat", "format", str),
    ("table", "table", str),
    ("keyPrefix", "key_prefix", str),
    ("start", "start", _where),
    ("startingOffsets", "start", _where),
    ("startingTimestamp", "start_ns", moment_ns),
    ("endingOffsets", "end", _where),
    ("endingTimestamp", "end_ns", moment_ns),
    ("cursor", "cursor", str),
    ("failOnDataLoss", "fail_on_data_loss", _flag),
    ("maxRecordsPerTrigger", "max_records", int),
    ("maxOffsetsPerTrigger", "max_records", int),
    ("minOffsetsPerTrigger", "min_records", int),
    ("maxTriggerDelay", "max_delay_seconds", _seconds),
    ("maxBytesPerTrigger", "max_bytes", _bytes),
    ("partitionBytes", "partition_bytes", _bytes),
    ("partitions", "partitions", int),
    ("batchBytes", "batch_bytes", _bytes),
)
"""What an option is called, the field it becomes, and how its text is read."""
PLACES: Final = {"start_ns": "start", "end_ns": "end"}
"""Fields that say the same as another, in another way."""
KNOWN: Final = (
    "path", "paths", "channels", "channelPattern", "nodes", "kinds", "fromPosition", "toPosition", "fromTime", "toTime",
)  # fmt: skip
"""The options that are not read one by one."""


def _json(kind: Any, option: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as exc:
        raise OptionsError(f"{option}={text!r}: {exc}") from None
