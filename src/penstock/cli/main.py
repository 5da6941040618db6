"""The command ``penstock``: collects what the modules beside it register.

A module of commands imports at its top what its signatures need: typer, ``output``, errors and types.  What a command
works with, the floors below and whatever they need, it imports when it runs.  So ``penstock cat`` does not wait for
Spark, and ``penstock --help`` waits for nothing.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli import bench, channels, demo, kv, logs, pipeline, pipeline_run, queue, state
from penstock.cli.output import PROBLEM, WRONG_USE, say_problem
from penstock.errors import OptionsError, PenstockError

__all__ = ["app", "main"]

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Durable channels on disk, carried to whatever turns them into work.",
    epilog="Example: penstock cat ticks --json | head    Completion: penstock --install-completion",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


for _module in (logs, queue, kv, state, channels, pipeline, pipeline_run, bench, demo):
    _module.register(app)


def main() -> None:
    """Run the command line; errors become one line on stderr and an exit code."""
    try:
        app(prog_name="penstock")
    except KeyboardInterrupt:
        sys.exit(130)
    except OptionsError as exc:
        say_problem(exc)
        sys.exit(WRONG_USE)
    except (PenstockError, OSError) as exc:
        say_problem(exc)
        sys.exit(PROBLEM)


if __name__ == "__main__":
    main()
