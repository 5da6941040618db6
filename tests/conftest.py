"""What every test may ask for."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings

# A slow machine is no failure.  What else there is stays: where CI is set, the examples are the same every time.
settings.register_profile("patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", default=False, help="run the long form of the long tests")


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; commands would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether the long form was asked for."""
    return bool(request.config.getoption("--long"))
