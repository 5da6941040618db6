"""What a long error of Spark's comes down to: one line, as a user needs it."""

from __future__ import annotations

import pytest

from penstock.errors import OptionsError, PenstockError
from penstock.spark.pipelines.run import error_of

FULL_DISK = """An error occurred while calling o455.parquet.
: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows to file:/lake/r. SQLSTATE: 58030
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.taskFailed(QueryExecutionErrors.scala:1)
Caused by: org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device
\t... 1 more
"""
NO_FOLDER = """An error occurred while calling o149.start.
: org.apache.hadoop.fs.ParentNotDirectoryException: Parent path is not a directory: file:/data/text.txt
\tat org.apache.hadoop.fs.RawLocalFileSystem.mkdirs(RawLocalFileSystem.java:878)
"""
IN_A_BATCH = """[STREAM_FAILED] Query [id = 1] terminated: … Return Message: Traceback (most recent call last):
  File "decode.py", line 108, in split_errors
pyspark.errors.exceptions.captured.AnalysisException: [AMBIGUOUS_REFERENCE] `error` is ambiguous. SQLSTATE: 42704
"""
IN_A_WORKER = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "mine.py", line 3, in <lambda>
AssertionError
"""

A_WORKER_THAT_WAS_KILLED = """An exception was raised by the Python Proxy. Traceback (most recent call last):
  File "table.py", line 12, in commit
py4j.protocol.Py4JJavaError: An error occurred while calling o98.collectToPython.
: org.apache.spark.SparkException: Job aborted: org.apache.spark.SparkException: Python worker exited unexpectedly.
\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator(PythonRunner.scala:1136)
Caused by: java.io.EOFException
\tat java.base/java.io.DataInputStream.readInt(DataInputStream.java:386)
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (FULL_DISK, "[TASK_WRITE_FAILED] Task failed while writing rows to file:/lake/r: No space left on device"),
        (NO_FOLDER, "Parent path is not a directory: file:/data/text.txt"),
        (IN_A_BATCH, "AnalysisException: [AMBIGUOUS_REFERENCE] `error` is ambiguous"),
        (IN_A_WORKER, "AssertionError"),
        (
            A_WORKER_THAT_WAS_KILLED,
            "Job aborted: org.apache.spark.SparkException: Python worker exited unexpectedly.: java.io.EOFException",
        ),
        (
            "[PARSE_SYNTAX_ERROR] Syntax error at or near 'x'. SQLSTATE: 42601 (line 1, pos 4)\n\n== SQL ==\na x",
            "[PARSE_SYNTAX_ERROR] Syntax error at or near 'x' (line 1, pos 4)",
        ),
        ("[USER_RAISED_EXCEPTION] a record has no key SQLSTATE: P0001", "a record has no key"),
        ("An error occurred while calling o1.x.\n: java.lang.Broken\n\tat a", "java.lang.Broken"),
    ],
    ids=["full disk", "no folder", "in a batch", "in a worker", "killed", "syntax", "raised", "without words"],
)  # fmt: skip
def test_an_error_of_spark_is_one_line_that_says_what_happened(text: str, line: str) -> None:
    found = error_of(text)
    assert (type(found), str(found)) == (PenstockError, line)


def test_an_error_of_ours_comes_through_spark_as_it_was() -> None:
    text = "Job aborted\nTraceback (most recent call last):\npenstock.errors.OptionsError: x: no path\n\tat org.x"
    assert isinstance(error_of(text), OptionsError)
