"""Building artifacts: how far a log has been folded when everything in it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.log.detect import open_log, open_writer
from penstock.spark.pipelines.artifact import _cursor


@pytest.mark.parametrize("format", ["xchannel", "messagelog", "filechannel"])
def test_the_cursor_of_all_there_is_is_the_end_of_a_log_of_any_format(format: str, tmp_path: Path) -> None:
    with open_writer(str(tmp_path / "log"), format=format) as writer:
        writer.append_many([b"x" * 100] * 50)
        with open_log(str(tmp_path / "log")) as log:
            assert _cursor(log, None) == log.next_position
