from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.testing.s3 import S3Server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """One server for all tests of this folder; each uses a prefix of its own."""
    with S3Server() as server:
        yield server
