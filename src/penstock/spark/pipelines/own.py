"""own: a user's function as a pipeline, found by its name and called with what its parameters ask for.

The plain form takes a DataFrame and returns one.  A function may ask for more by naming it:

    frame        the source as a DataFrame; also what the first parameter gets when its name says nothing
    spark        the session                    source, channels, log    the path of the source
    table        the path of the result         checkpoint               where a stream keeps how far it has come
    options      options of the source          trigger                  when a stream makes a batch
    on_progress  to be called with Progress

Every other parameter is a setting, given by the caller as text and turned into the type it is annotated with.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, get_type_hints

import msgspec

from penstock.errors import OptionsError, PenstockError
from penstock.spark import lake
from penstock.spark.lake.checkpoint import checkpoint_here
from penstock.spark.pipelines.run import Progress, Summary, checkpoint_of, fit_table, follow, load, replace, stream
from penstock.spark.source.options import local_path, path_here

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["PipelineJob", "arguments_of", "find_function", "run"]

PACKAGE: Final = "penstock.spark.pipelines"
OURS: Final = ("aggregate", "audit", "compact", "decode", "fold", "ingest", "replay", "report")
SOURCE_NAMES: Final = ("source", "channels", "log", "path")
GIVEN: Final = {"frame", "spark", "table", "checkpoint", "options", "trigger", "on_progress", *SOURCE_NAMES}


class PipelineJob(msgspec.Struct, kw_only=True):
    """What a function is run on.

    >>> PipelineJob(source="data/channels").stream
    False
    """

    source: str
    table: str | None = None
    checkpoint: str | None = None
    stream: bool = False
    options: Mapping[str, Any] = {}
    trigger: Mapping[str, Any] = msgspec.field(default_factory=lambda: {"availableNow": True})
    settings: Mapping[str, str] = {}


def find_function(name: str) -> Callable[..., Any]:
    """Return ``module:function``, from the current folder too, or a pipeline of penstock's own by its name.

    >>> find_function("report").__name__
    'report'
    """
    module, _, function = name.partition(":")
    if not function:
        if name not in OURS:
            raise OptionsError(f"{name}: not one of {', '.join(OURS)}; a function of yours is written module:function")
        module, function = f"{PACKAGE}.{name}", name
    elif os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as exc:
        if exc.name is None or not (module == exc.name or module.startswith(exc.name + ".")):
            raise  # the module is there, and misses one of its own
        raise OptionsError(f"{name}: there is no module {module} here or where Python looks") from None
    except SyntaxError as exc:
        raise OptionsError(
            f"{name}: {exc.msg} ({os.path.basename(exc.filename or module)}, line {exc.lineno})"
        ) from None
    except AttributeError:
        raise OptionsError(f"{name}: the module {module} has no function {function}") from None
    if not callable(found):
        raise OptionsError(f"{name}: it is no function")
    try:
        inspect.signature(found)
    except ValueError:
        raise OptionsError(f"{name}: it does not say what it takes") from None
    return found  # type: ignore[no-any-return]


def arguments_of(
    function: Callable[..., Any], job: PipelineJob, given: Mapping[str, Callable[[], Any]]
) -> dict[str, Any]:
    """Return what the function's parameters get; ``given`` makes what has to be made, and only when it is asked for.

    >>> def hottest(readings, *, limit: int = 10): ...
    >>> arguments_of(hottest, PipelineJob(source="x", settings={"limit": "3"}), {"frame": lambda: "a DataFrame"})
    {'readings': 'a DataFrame', 'limit': 3}
    """
    parameters, hints = inspect.signature(function).parameters, _hints(function)
    unknown = [name for name in job.settings if name not in parameters or name in GIVEN]
    if unknown:
        raise OptionsError(f"{function.__name__} has no setting {', '.join(unknown)}")
    found: dict[str, Any] = {}
    for place, (name, parameter) in enumerate(parameters.items()):
        optional = parameter.default is not inspect.Parameter.empty
        if name in job.settings:
            found[name] = _convert(name, job.settings[name], hints.get(name, str))
        elif name in SOURCE_NAMES:
            found[name] = job.source
        elif name in given:
            found[name] = given[name]()
        elif name in ("table", "checkpoint"):
            value = getattr(job, name)
            if value is None and not optional:
                raise OptionsError(f"{function.__name__} needs a {name}")
            found[name] = value
        elif optional or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        elif place == 0:
            found[name] = given["frame"]()
        else:
            raise OptionsError(f"{function.__name__} needs {name}: give it with --set {name}=…")
    return found


def run(
    spark: SparkSession,
    function: Callable[..., Any],
    job: PipelineJob,
    on_progress: Callable[[Progress], None] | None = None,
) -> Any:
    """Run a function on a source.

    A DataFrame that it returns becomes the whole content of ``job.table`` in one commit, or, of a stream, is added to
    it batch by batch, each exactly once; without a table it is handed back.  Anything else is handed back as it is.
    """
    given: dict[str, Callable[[], Any]] = {
        "spark": lambda: spark,
        "frame": lambda: _frame(spark, job),
        "options": lambda: job.options,
        "trigger": lambda: job.trigger,
        "on_progress": lambda: on_progress,
    }
    result = _call(function, arguments_of(function, job, given))
    if not hasattr(result, "isStreaming"):
        if job.table is not None and "table" not in inspect.signature(function).parameters:
            raise OptionsError(f"{function.__name__} gave no DataFrame: there is nothing to put into {job.table}")
        return result
    if job.table is None:
        if result.isStreaming:
            raise OptionsError("a stream needs a table to go to")
        return result
    if not result.isStreaming:
        return {"table": job.table, "rows": replace(result, job.table)}
    return _append_batches(result, job.table, job, on_progress)


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function; an error of Python's in it becomes one line that says where it is."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        return function(**arguments)
    except (PenstockError, PySparkException, Py4JError, OSError):
        raise  # these speak for themselves
    except Exception as exc:
        code = getattr(function, "__code__", None)
        places = traceback.extract_tb(exc.__traceback__)[1:]
        own = [place for place in places if code is not None and place.filename == code.co_filename]
        where = f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""
        raise PenstockError(f"{function.__name__}: {type(exc).__name__}: {exc}{where}") from exc


def _frame(spark: SparkSession, job: PipelineJob) -> DataFrame:
    return (stream if job.stream else load)(spark, job.source, job.options)


def _append_batches(
    frame: DataFrame, table: str, job: PipelineJob, on_progress: Callable[[Progress], None] | None
) -> Summary:
    fit_table(frame, table)
    spark = frame.sparkSession
    table, checkpoint = path_here(spark, table), checkpoint_here(spark, job.checkpoint or checkpoint_of(table))
    app = "own-" + hashlib.sha256(os.path.abspath(local_path(checkpoint)).encode()).hexdigest()[:16]

    def write(rows: DataFrame, batch: int) -> None:
        lake.append(rows, table, app=app, batch=batch, query=lake.query_of(checkpoint))

    query = frame.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint).trigger(**job.trigger)
    return follow(query.start(), on_progress)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError):  # names that exist for the type checker only
        return {}


def _convert(name: str, text: str, hint: Any) -> Any:
    try:
        return msgspec.convert(text, hint, strict=False)
    except (msgspec.ValidationError, TypeError) as plain:
        try:
            return msgspec.json.decode(text.encode(), type=hint)
        except msgspec.ValidationError as exc:  # it is JSON, of another type
            raise OptionsError(f"{name}={text!r}: {exc}") from None
        except (msgspec.MsgspecError, TypeError):
            raise OptionsError(f"{name}={text!r}: {plain}") from None
