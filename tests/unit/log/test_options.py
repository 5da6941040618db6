"""Promise: a sync mode is one of three."""

from __future__ import annotations

import pytest

from penstock.errors import OptionsError
from penstock.log.options import DEFAULT_LIMIT, check_sync


def test_what_is_no_sync_mode_is_refused() -> None:
    for mode in ("none", "interval", "always"):
        check_sync(mode, 0.1)
    for mode, seconds in (("", 1.0), ("Always", 1.0), ("none", 0.0), ("none", -1.0), ("interval", float("nan"))):
        with pytest.raises(OptionsError, match="must be"):
            check_sync(mode, seconds)
    assert DEFAULT_LIMIT == 65_536
