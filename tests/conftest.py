"""What every test may ask for."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings

# A slow machine is no failure.  A run says something about the change it is a run of, so its examples are the same
# every time; the long forms look for new ones.
settings.register_profile("patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("patient"), derandomize=True, database=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", default=False, help="run the long form of the long tests")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("patient" if config.getoption("--long") else "same")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; commands would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether the long form was asked for."""
    return bool(request.config.getoption("--long"))
