from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.artifact import export_store
from penstock.store import AppendLogStore
from penstock.testing.clock import FakeClock
from penstock.types import KvUpdate, WatchCursor


@pytest.fixture
def make_artifact(tmp_path: Path) -> Callable[..., Path]:
    """Return what makes an artifact at a cursor; ``salt`` makes another one at the same."""
    made = []

    def make(revision: int | None, salt: int = 0) -> Path:
        folder = tmp_path / f"made{len(made)}"
        folder.mkdir()
        made.append(folder)
        cursor = WatchCursor() if revision is None else WatchCursor.of(revision)
        with AppendLogStore.open(folder / "fold.snap") as store:
            store.apply([KvUpdate.put("salt", b"%d" % salt, revision)], cursor)
            export_store(store, folder / "artifact", clock=FakeClock(now_ns=(1_700_000_000 + len(made)) * 10**9))
        return folder / "artifact"

    return make
