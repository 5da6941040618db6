"""The command ``penstock``: collects what the modules beside it register.

A module of commands imports at its top what its signatures need: typer, ``output``, errors and types.  What a command
works with, the floors below and whatever they need, it imports when it runs.  So ``penstock cat`` does not wait for
Spark, and ``penstock --help`` waits for nothing.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Any

import typer

from penstock.cli import (
    artifact,
    bench,
    channels,
    demo,
    groups,
    keep,
    kv,
    ledger,
    logs,
    mqtt,
    pipeline,
    pipeline_run,
    queue,
    serve,
    ship,
    state,
    write,
)
from penstock.cli.output import PROBLEM, WRONG_USE, plain_handler, say_problem, visible
from penstock.errors import OptionsError, PenstockError

__all__ = ["app", "main"]

WrongUse: Any = typer.BadParameter.__mro__[2]
"""What typer raises for words that it does not understand."""

EXTRAS = {"pyspark": "spark", "pyarrow": "spark", "deltalake": "spark", "pandas": "connect", "grpc": "connect",
    "prometheus_client": "serve", "tomli_w": "serve", "uvloop": "serve", "websockets": "serve", "argon2": "serve",
}  # fmt: skip
"""Packages that only commands on Spark need, and the extra that brings each; the floors below speak for themselves."""

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: it takes [default: …] for what it is, and does not load rich for markdown
    context_settings={"max_content_width": 120, "help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Durable channels on disk, carried to whatever turns them into work.",
    epilog="Example: penstock cat ticks --json | head",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"penstock {metadata.version('penstock')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


MODULES = (
    logs,
    write,
    queue,
    groups,
    kv,
    state,
    channels,
    artifact,
    ship,
    mqtt,
    serve,
    ledger,
    keep,
    pipeline,
    pipeline_run,
    bench,
    demo,
)
for _module in MODULES:
    _module.register(app)


def main() -> None:
    """Run the command line; errors become one line on stderr and an exit code."""
    if sys.stdout is None:  # closed by whoever started us: what is printed would be lost, and still be acknowledged
        say_problem("standard output is closed")
        sys.exit(PROBLEM)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - as long as the process
    damage = logging.getLogger("penstock.log.damage")  # commands say it themselves, once
    damage.addHandler(logging.NullHandler())
    damage.propagate = False
    logging.lastResort = plain_handler()  # where nobody set up logging: warnings name files, and names are data
    try:
        sys.exit(app(prog_name="penstock", standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(130)
    except typer.Abort:
        say_problem("given up")
        sys.exit(PROBLEM)
    except WrongUse as exc:
        exc.message = "\n".join(map(visible, exc.message.split("\n")))  # the words were perhaps names of files
        exc.show()
        sys.exit(exc.exit_code)
    except OptionsError as exc:
        say_problem(exc)
        sys.exit(WRONG_USE)
    except (PenstockError, OSError) as exc:
        say_problem(exc)
        sys.exit(PROBLEM)
    except UnicodeEncodeError:  # what it is, is not said: it may be a password
        say_problem("a word of the command is not UTF-8 and has to be")
        sys.exit(WRONG_USE)
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        say_problem(f"this command needs the package {package}: pip install 'penstock[{EXTRAS[package]}]'")
        sys.exit(PROBLEM)


if __name__ == "__main__":
    main()
