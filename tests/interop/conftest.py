"""What the interoperability tests need: mosquitto and its clients, by package name."""

from __future__ import annotations

import shutil

import pytest

NEEDED = {"mosquitto": "mosquitto", "mosquitto_pub": "mosquitto-clients", "mosquitto_sub": "mosquitto-clients",
          "mosquitto_passwd": "mosquitto"}  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run only from `make interop`: nothing but PyPI is needed for `make test`."""
    if not config.getoption("--long"):
        here = [item for item in items if "/tests/interop/" in str(item.path)]
        for item in here:
            items.remove(item)
        config.hook.pytest_deselected(items=here)


@pytest.fixture(autouse=True, scope="module")
def _mosquitto(request: pytest.FixtureRequest) -> None:
    if request.path.name in (
        "test_narwhal.py",
        "test_narwhal_same.py",
        "test_azure.py",
    ):  # they say themselves what they need
        return
    missing = sorted({package for command, package in NEEDED.items() if shutil.which(command) is None})
    if missing:
        pytest.fail(f"missing: apt-get install {' '.join(missing)}", pytrace=False)
