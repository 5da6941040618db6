"""Runs commands in one process under limits of memory and time, and prints what each answered, as JSON lines.

    python hostile_child.py MEMORY_BYTES CPU_SECONDS < lines of JSON: lists of words

Memory is what the process may allocate; mapped files do not count.  A command that takes longer than the seconds is
interrupted, and that is its answer.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import sys
import time
import traceback
from typing import Any


class TooLong(BaseException):
    """Not an Exception: nothing may catch it and go on."""


def interrupt(*_: Any) -> None:
    raise TooLong


def read_as_spark(path: str, loss: str) -> None:
    """Plan and read a log as Spark's driver and tasks do; what they raise is an answer like that of a command."""
    from penstock.errors import PenstockError
    from penstock.spark.source.columns import BASE
    from penstock.spark.source.options import SourceOptions
    from penstock.spark.source.table import LogSourceReader

    try:
        reader = LogSourceReader(SourceOptions.of({"path": path, "failOnDataLoss": loss}), BASE)
        for partition in reader.partitions():
            for _ in reader.read(partition):
                pass
    except (PenstockError, OSError) as exc:
        print(exc, file=sys.stderr)
        raise SystemExit(1) from None


def where(exc: BaseException) -> list[str]:
    return [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(exc.__traceback__)[-8:]]


def main() -> None:
    memory, seconds = int(sys.argv[1]), float(sys.argv[2])
    from penstock.cli import main as cli

    for module in (
        "penstock.log.detect",
        "penstock.log.messagelog.log",
        "penstock.log.filechannel",
        "penstock.cli.records",
    ):
        __import__(module)
    lines = [json.loads(line) for line in sys.stdin]
    if any(words[0] == "spark" for words in lines):
        __import__("penstock.spark.source.table")
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    signal.signal(signal.SIGPROF, interrupt)
    real = os.fdopen(os.dup(1), "w")
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    for words in lines:
        sys.argv = ["penstock", *words]
        errors, began = io.StringIO(), time.process_time()
        answer: dict[str, Any] = {"words": words}
        cli.say_problem.__globals__["stderr"].file = errors
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            with contextlib.redirect_stderr(errors):
                if words[0] == "spark":
                    read_as_spark(*words[1:])
                else:
                    cli.main()
            answer["code"] = 0
        except SystemExit as exc:
            answer["code"] = exc.code or 0
        except TooLong as exc:
            answer |= {"code": "too long", "at": where(exc)}
        except MemoryError as exc:
            answer |= {"code": "MemoryError", "at": where(exc)}
        except BaseException as exc:  # whatever it is, it is the answer
            answer["code"] = f"{type(exc).__name__}: {exc}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        answer["cpu"] = round(time.process_time() - began, 2)
        answer["stderr"] = errors.getvalue()[-400:]
        print(json.dumps(answer), file=real, flush=True)


if __name__ == "__main__":
    main()
