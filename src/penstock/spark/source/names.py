"""Which options there are: every one is known and applies, or is refused with the nearest name.

Spark mixes its own with those of the user; these are let through.  Of a table in its catalog it also hands over the
properties, and each option a second time as ``option.NAME``: so one can be told from the other.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

from penstock.errors import OptionsError

__all__ = ["USES", "check_names", "check_use", "given_options", "is_catalog_table", "nearest"]

OF_QUERIES: Final = ("checkpointLocation", "queryName", "path", "paths")
OF_CATALOGS: Final = (
    "owner", "provider", "location", "comment", "external", "is_managed_location", "collation", "serialization.format",
)  # fmt: skip
TWIN: Final = "option."
LOGS: Final = (
    "logFormat", "channels", "channelPattern", "nodes", "failOnDataLoss", "partitionBytes", "partitions", "batchBytes",
    "kinds", "fromTime", "toTime", "startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp",
)  # fmt: skip
PACE: Final = (
    "maxRecordsPerTrigger", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay",
)  # fmt: skip

USES: Final[dict[str, tuple[str, ...]]] = {
    "a batch of logs": (*LOGS, "fromPosition", "toPosition"),
    "a stream": (*LOGS, "start", "cursor", *PACE),
    "a fold": ("table", "keyPrefix", "batchBytes"),
    "the table channels": ("table",),
    "a check of logs": (
        "logFormat",
        "channels",
        "channelPattern",
        "nodes",
        "failOnDataLoss",
        "partitionBytes",
        "partitions",
        "batchBytes",
    ),
    "a batch into a log": ("appId", "batchId", "logFormat", "content", "maxMessageBytes"),
    "a stream into a log": ("appId", "logFormat", "content", "maxMessageBytes"),
    "a bucket": ("bucket",),
}
"""What is read or written, and the options that mean something there."""


def check_names(options: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an option that is not known, by the name that is nearest to it.

    >>> check_names({"appld": "billing", "owner": "ann"}, ["appId"])
    Traceback (most recent call last):
    penstock.errors.OptionsError: option appld is not known: is it appId?
    """
    names = {name.lower(): name for name in known}
    for option in _own(options):
        if option not in names:
            raise OptionsError(f"option {option} is not known{nearest(option, sorted(names.values()))}")


def check_use(options: Mapping[str, str], use: str, also: Iterable[str] = ()) -> None:
    """Refuse an option that means nothing for one of USES; ``also`` are more that do.

    >>> check_use({"path": "ticks", "Start": "latest"}, "a batch of logs")
    Traceback (most recent call last):
    penstock.errors.OptionsError: option start is not for a batch of logs: it is for a stream
    """
    here = {name.lower() for name in (*USES[use], *also)}
    for option in _own(options):
        if option in here:
            continue
        for name in {name for names in USES.values() for name in names}:
            if name.lower() == option:
                uses = " and ".join(other for other, names in USES.items() if name in names)
                raise OptionsError(f"option {name} is not for {use}: it is for {uses}")
        check_names([option], (*USES[use], *also))


def is_catalog_table(options: Iterable[str]) -> bool:
    """Whether these are the options with which a table of Spark's catalog is made.

    >>> is_catalog_table({"owner": "ann", "provider": "penstock", "path": "data"}), is_catalog_table({"path": "data"})
    (True, False)
    """
    return {"owner", "provider"} <= {name.lower() for name in options}


def given_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options without what Spark adds to them for its catalog, by their names in small letters.

    >>> given_options({"owner": "ann", "provider": "penstock", "path": "file:/data", "Kinds": "3", "option.kinds": "3"})
    {'kinds': '3', 'path': 'file:/data'}
    """
    found = {name.lower(): value for name, value in options.items()}
    return {name: found[name] for name in sorted({*_own(options), *({"path", "paths"} & found.keys())})}


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint at the name that was meant, or at all there are.

    >>> nearest("paylod", ["payload", "kind"]), nearest("x", ["payload", "kind"])
    (': is it payload?', '; there are payload, kind')
    """
    there = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), there, 1)
    return f": is it {there[close[0]]}?" if close else f"; there are {', '.join(there.values())}"


def _own(options: Iterable[str]) -> list[str]:
    """Return the options that are not Spark's own, in small letters."""
    found = {name.lower() for name in options}
    passed = {name.lower() for name in OF_QUERIES}
    if is_catalog_table(found):
        twins = {name for name in found if name.startswith(TWIN)}
        ours = {name.lower() for names in USES.values() for name in names}
        passed |= twins | {name for name in found if TWIN + name not in found and name not in ours}
    return sorted(found - passed - set(OF_CATALOGS))
