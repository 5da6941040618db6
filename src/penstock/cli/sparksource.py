"""Options of commands that read channels on Spark: which of them, from where, how fast."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.errors import OptionsError

__all__ = ["ChannelNames", "Cursor", "Option", "Start", "Ui", "pairs", "source_options"]

Option = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option of the source.", show_default=False),
]
Start = Annotated[
    str | None,
    typer.Option(help="Where to begin: earliest, latest, a time (ISO 8601), or JSON of channel to position."),
]
ChannelNames = Annotated[
    str | None, typer.Option("--channels", help="Only these, with commas; site/* for all that begin so.")
]
Cursor = Annotated[str | None, typer.Option(help="Name of a cursor beside each log that follows what is done.")]
Ui = Annotated[bool, typer.Option("--ui", help="Show Spark's own pages on a free port of this machine.")]


def pairs(words: list[str] | None) -> dict[str, str]:
    """Return NAME=VALUE words by name.

    >>> pairs(["partitions=2"]), pairs(None)
    ({'partitions': '2'}, {})
    """
    found = {}
    for word in words or []:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise OptionsError(f"{word!r}: write it as name=value")
        found[name] = value
    return found


def source_options(
    option: list[str] | None = None,
    *,
    start: str | None = None,
    channels: str | None = None,
    cursor: str | None = None,
    max_records: int | None = None,
) -> dict[str, Any]:
    """Return what was given as options of the source; one that is said twice is refused.

    >>> source_options(["partitions=2"], start="latest")
    {'partitions': '2', 'startingOffsets': 'latest'}
    >>> source_options(start="2026-11-16T07:00:00Z")
    {'startingTimestamp': '2026-11-16T07:00:00Z'}
    """
    found: dict[str, Any] = pairs(option)
    more: dict[str, Any] = {"channels": channels, "cursor": cursor, "maxRecordsPerTrigger": max_records}
    if start is not None:
        timed = start[:1].isdigit() and not start.lstrip().startswith("{")
        more["startingTimestamp" if timed else "startingOffsets"] = start
    taken = {name.lower() for name in found}
    for name, value in more.items():
        if value is None:
            continue
        if name.lower() in taken:
            raise OptionsError(f"--option {name} and its own option say the same: give one of them")
        found[name] = value
    return found
