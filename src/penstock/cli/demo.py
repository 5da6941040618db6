"""``penstock demo``: the command; what it runs is in the modules ``demo_*``."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: penstock demo --readings 50000")(demo)


def demo(
    readings: Annotated[int, typer.Option(min=1000, max=100_000_000, help="How many readings are sent.")] = 100_000,
    out: Annotated[str, typer.Option(help="The folder of the report.")] = "demo-out",
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the node's data and the lake in that folder too.")
    ] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Stay up afterwards, until Ctrl-C.")] = False,
    ticks: Annotated[
        bool, typer.Option("--ticks", help="The small demo, without Spark: one process writes, two read.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="With --ticks: how long it writes.")] = 12.0,
    rate: Annotated[int, typer.Option(min=1000, help="With --ticks: ticks a second.")] = 400_000,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run a node with 50 devices and Spark, kill both, and count.

    Readings go through taps and ingest into channels, to an object store, through Spark into the lake; what Spark found
    comes back as retained messages and bucket entries, and a second node begins with an artifact of the first.  At the
    end every count is held against what the devices remember, and the ledger against itself.
    """
    if ticks:
        from penstock.cli.demo_ticks import show_ticks

        show_ticks(seconds, rate, json=json)
    else:
        from penstock.cli.demo_run import show_readings

        show_readings(readings, out, keep=keep, serve=serve, json=json)
