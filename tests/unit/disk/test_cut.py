"""A file that a library maps is watched for being cut; growing is none of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.disk.cut import CutWatch
from penstock.errors import CorruptionError


def test_a_file_that_grows_while_another_thread_looks_was_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"12345")
    watch = CutWatch(str(path))
    look = watch._file.stat

    def look_and_be_overtaken() -> Any:
        seen = look()
        monkeypatch.undo()
        path.write_bytes(b"1234567890")
        watch.check()  # as another thread does
        return seen

    monkeypatch.setattr(watch, "_file", Slow(watch._file, look_and_be_overtaken))
    watch.check()
    path.write_bytes(b"123")
    with pytest.raises(CorruptionError, match="had 10 bytes"):
        watch.check()
    watch.close()


class Slow:
    """A file whose size is told late."""

    def __init__(self, file: Any, stat: Any) -> None:
        self._file, self.stat = file, stat

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
