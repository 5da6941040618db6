"""What the tests of shipping share."""

from __future__ import annotations

import pytest
from obstore.store import MemoryStore

from penstock.disk.objectstore import Obstore


@pytest.fixture
def store() -> Obstore:
    return Obstore(MemoryStore(), "memory://m")
