"""``penstock demo``: the command; what it runs is in the modules ``demo_*``."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: penstock demo --readings 200000")(demo)


def demo(
    readings: Annotated[int, typer.Option(min=1000, max=100_000_000, help="How many readings are sent.")] = 1_000_000,
    out: Annotated[str, typer.Option(help="The folder of the report.")] = "demo-out",
    keep: Annotated[bool, typer.Option("--keep", help="Leave channels, lake and fold in that folder too.")] = False,
    ticks: Annotated[
        bool, typer.Option("--ticks", help="The small demo, without Spark: one process writes, two read.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="With --ticks: how long it writes.")] = 12.0,
    rate: Annotated[int, typer.Option(min=1000, help="With --ticks: ticks a second.")] = 400_000,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Carry a million readings through it all, kill Spark, and count.

    Four processes write them to channels; Spark takes them to the lake, is killed once on the way, folds and
    aggregates them and writes a report.  At the end every count is held against what the writers remember.
    """
    if ticks:
        from penstock.cli.demo_ticks import show_ticks

        show_ticks(seconds, rate, json=json)
    else:
        from penstock.cli.demo_run import show_readings

        show_readings(readings, out, keep=keep, json=json)
