"""Promise: each format as a DataFrame is what ``penstock cat --json`` prints, however many cores read it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cat_frames import cat, generate, printed_row, restore_vectors
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.log.detect import FORMATS
from penstock.spark.digest import digest_of

PRINTED = "position long, timestamp_ns long, kind int, seq long, `from` string, payload string, payload_base64 string"
SCRIPT = Path(__file__).parents[2] / "support" / "spark_digest.py"


def load(spark: Any, path: Path, **options: Any) -> Any:
    return spark.read.format("penstock").options(**options).load(str(path))


def test_the_vectors_as_one_dataframe_are_what_is_printed(spark: Any, tmp_path: Path) -> None:
    logs = restore_vectors(tmp_path)
    found: dict[str, list[dict[str, Any]]] = {}
    for row in load(spark, tmp_path).orderBy("channel", "position").collect():
        found.setdefault(row["channel"], []).append(printed_row(row.asDict()))
    for log in logs:
        printed = CliRunner().invoke(app, ["cat", "--json", str(log)]).stdout.splitlines()
        assert found.pop(str(log.relative_to(tmp_path)), []) == [json.loads(line) for line in printed], log
    assert not found


def test_a_digest_tells_every_difference_and_no_order(spark: Any) -> None:
    def digest(*rows: tuple[Any, ...], names: str = "a int, b string, c binary") -> Any:
        return digest_of(spark.createDataFrame(list(rows), names))

    first, second = (1, "x", b"y"), (2, None, b"z")
    whole = digest(first, second)
    assert whole.rows == 2
    assert digest(second, first) == whole
    assert digest((b"y", "x", 1), (b"z", None, 2), names="c binary, b string, a int") == whole
    for other in ((first,), (first, first), (first, (2, "", b"z")), (first, (2, "z", None)), (first, (2, None, b"zz"))):
        assert digest(*other) != whole
    assert digest((1, "x", b"y"), (1, "x", b"y"), (2, None, b"z")).digest != whole.digest
    assert digest() == digest()


@pytest.mark.timeout(3600)
def test_generated_records_are_what_is_printed_and_the_same_for_any_number_of_tasks(
    spark: Any, tmp_path: Path, long_run: bool
) -> None:
    records = 10_000_000 if long_run else 100_000
    digests = {}
    for kind in FORMATS:
        generate(tmp_path / kind, kind, records)
        frame = load(spark, tmp_path / kind)
        columns = ["position", "timestamp_ns", "kind", "payload"]
        columns += ["seq", "from"] if kind == "messagelog" else []
        found = digest_of(frame.select(*columns))
        assert found.rows == records
        cat(tmp_path / kind, tmp_path / "printed.json")
        printed = spark.read.schema(PRINTED).json(str(tmp_path / "printed.json")).selectExpr(
            "position", "timestamp_ns", "kind", "seq", "cast(`from` as binary) as `from`",
            "coalesce(cast(payload as binary), unbase64(payload_base64)) as payload",
        )  # fmt: skip
        assert digest_of(printed.select(*columns)) == found, kind
        (tmp_path / "printed.json").unlink()
        digests[kind] = digest_of(frame)
        for tasks in ("1", "7"):
            again = load(spark, tmp_path / kind, partitions=tasks, partitionBytes="16m")
            assert digest_of(again) == digests[kind], (kind, tasks)
    if long_run:  # a Spark of its own
        for master in ("local[1]", "local[2]"):
            command = [sys.executable, str(SCRIPT), master, *(str(tmp_path / kind) for kind in FORMATS)]
            printed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            assert printed == {str(tmp_path / kind): [records, digests[kind].digest] for kind in FORMATS}, master
