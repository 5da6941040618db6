"""The command ``penstock``: collects what the modules beside it register."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib import metadata
from typing import Annotated

import typer

from penstock import cli
from penstock.cli.output import PROBLEM, WRONG_USE, stderr
from penstock.errors import OptionsError, PenstockError

__all__ = ["app", "main"]

NOT_COMMANDS = {"main", "output", "buckets", "follow", "demo_ticks", "demo_readings", "demo_spark", "sparkwork"}

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
        typer.echo(f"penstock {metadata.version('penstock')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


for _module in sorted(module.name for module in pkgutil.iter_modules(cli.__path__)):
    if _module not in NOT_COMMANDS:
        importlib.import_module(f"penstock.cli.{_module}").register(app)


def main() -> None:
    """Run the command line; errors become one line on stderr and an exit code."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except OptionsError as exc:
        _say(exc)
        sys.exit(WRONG_USE)
    except (PenstockError, OSError) as exc:
        _say(exc)
        sys.exit(PROBLEM)


def _say(exc: BaseException) -> None:
    stderr.print(f"[bold red]penstock:[/] {type(exc).__name__}: ", end="", highlight=False)
    stderr.print(str(exc), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
