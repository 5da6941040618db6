"""What every test may ask for."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A slow machine is no failure.  A run says something about the change it is a run of, so its examples are the same
# every time; the long forms look for new ones.
settings.register_profile("patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("patient"), derandomize=True, database=None)

HERE = Path(__file__).resolve().parent
LATER = {"conformance", "models", "property", "unit"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", default=False, help="run the long form of the long tests")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("patient" if config.getoption("--long") else "same")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; commands would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """Two workers a core: half of the time a test waits for processes it started, for a sync or for a timer."""
    return 2 * (os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what starts processes and takes long, so that no worker is left with it at the end."""

    def later(item: pytest.Item) -> bool:
        parts = item.path.relative_to(HERE).parts
        return parts[0] in LATER and "bench" not in parts

    items.sort(key=later)


@pytest.fixture
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether the long form was asked for."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(autouse=True, scope="module")
def _give_memory_disks_back() -> Iterator[None]:
    """Free what tests left in cycles: each file of a memory disk has a descriptor, and some clients know only 1,024."""
    yield
    gc.collect()
