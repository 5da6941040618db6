"""A class-data archive: Spark's classes as the JVM keeps them in memory, so that it starts in half the time.

Made once for a Python environment, inside it, and found there by every session (``penstock pipeline prepare``):

    <sys.prefix>/share/penstock/spark/            a SPARK_HOME of two links, because the archive holds the class path
    <sys.prefix>/share/penstock/spark-<key>.jsa   the archive, about 190 MB; key: the Java, the jars

The JVM checks the archive against its own version and the jars' times, and goes on without it when they differ.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from typing import Final

from penstock.disk.plain import make_folders
from penstock.errors import UnsupportedError

__all__ = ["archive_of", "make_archive", "make_home"]

MAKE: Final = """
import sys
from penstock.spark.session import start
from penstock.log.xchannel import Writer
spark, _ = start(master="local[2]", memory="1g", java_options="-XX:ArchiveClassesAtExit=" + sys.argv[1])
folder = sys.argv[2]
with Writer.open(folder + "/ticks") as writer:
    writer.append_many([b"a", b"b"])
frame = spark.read.format("penstock").load(folder + "/ticks")
frame.groupBy("kind").count().orderBy("kind").write.parquet(folder + "/table")
spark.read.parquet(folder + "/table").collect()
stream = spark.readStream.format("penstock").load(folder + "/ticks").writeStream
stream = stream.foreachBatch(lambda rows, batch: rows.count()).option("checkpointLocation", folder + "/checkpoint")
stream.trigger(availableNow=True).start().awaitTermination()
from pyspark import SparkContext
process = SparkContext._gateway.proc
spark.stop()
process.stdin.close()
process.wait()
"""
"""What a session is made to do, so that the classes it needs are loaded; the JVM writes the archive when it ends."""


def archive_of(java: str) -> str:
    """Return where the archive for this Java and the installed pyspark is, or would be.

    >>> os.path.basename(archive_of("/usr/bin/java"))[:6]
    'spark-'
    """
    import pyspark

    jars = os.path.join(os.path.dirname(pyspark.__file__), "jars")
    real = os.path.realpath(java)
    times = [str(os.stat(path).st_mtime_ns) if os.path.exists(path) else "" for path in (real, jars)]
    marks = [real, pyspark.__version__, *times]
    key = hashlib.sha256("\0".join(marks).encode()).hexdigest()[:12]
    return os.path.join(_folder(), f"spark-{key}.jsa")


def make_home(home: str) -> str:
    """Make a SPARK_HOME of links to what is installed, so that workers import pyspark itself and not its zip.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sorted(os.listdir(make_home(folder + "/spark")))
    ['bin', 'jars']
    """
    import pyspark

    package = os.path.dirname(pyspark.__file__)
    make_folders(home)
    for part in ("bin", "jars"):
        link, target = os.path.join(home, part), os.path.join(package, part)
        if not os.path.islink(link):
            os.symlink(target, link)
        elif os.readlink(link) != target:  # the environment was moved
            os.unlink(link)
            os.symlink(target, link)
    return home


def shared_home() -> str:
    """Return the SPARK_HOME that belongs to the archive."""
    return os.path.join(_folder(), "spark")


def make_archive(*, timeout_seconds: float = 600) -> str:
    """Make the archive of this environment, replacing the one there is; return its path.

    >>> make_archive.__name__  # it runs Spark for half a minute
    'make_archive'
    """
    from penstock.spark.session import find_java

    java, bundled = find_java()
    path = archive_of(java)
    try:
        make_folders(_folder())
        make_home(shared_home())
    except OSError as exc:
        raise UnsupportedError(f"this environment cannot be written to: {exc}") from None
    if bundled:  # its runtime comes without the archive of Java's own classes, on which ours builds
        subprocess.run([java, "-Xshare:dump"], capture_output=True, check=False)
    if os.path.exists(path):
        os.unlink(path)
    with tempfile.TemporaryDirectory(prefix="penstock-archive-") as folder:
        made = f"{path}.{os.getpid()}"
        done = subprocess.run(
            [sys.executable, "-c", MAKE, made, folder],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        if done.returncode or not os.path.exists(made):
            raise UnsupportedError(f"Java wrote no archive: {done.stderr.strip() or 'it said nothing'}")
        os.replace(made, path)
    return path


def _folder() -> str:
    return os.path.join(sys.prefix, "share", "penstock")
