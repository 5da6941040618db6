"""Promise: what can be no address is an error of whoever wrote it down, and nobody is asked."""

from __future__ import annotations

import pytest

from penstock.errors import OptionsError
from penstock.net import Endpoint, Target


@pytest.mark.parametrize(("host", "port"), [("a..b", 1), ("a" * 64, 1), ("", 1), ("a\0b", 1), ("a", -1), ("a", 65_536)])
def test_what_can_be_no_address_is_refused_before_anybody_is_asked(host: str, port: int) -> None:
    with pytest.raises(OptionsError, match=r"no name of a host|does not exist"):
        Target(host=host, port=port)
    with pytest.raises(OptionsError, match=r"^door: "):
        Endpoint(name="door", host=host, port=port)
