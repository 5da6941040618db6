"""Promise: an extra brings nothing that no module uses, and ``all`` is the sum of the extras."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MODULES = {
    "nats-py": "nats",
    "prometheus-client": "prometheus_client",
    "tomli-w": "tomli_w",
    "argon2-cffi": "argon2",
    "pyjwt": "jwt",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}
OF_SPARK = {"pandas"}
"""What pyspark itself imports for Spark Connect and does not ask for."""


def imported() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found


def names(extra: str) -> set[str]:
    return {re.split(r"[\[<>=;! ]", requirement)[0] for requirement in EXTRAS[extra]} - {"penstock"}


def test_every_package_of_an_extra_is_imported_somewhere() -> None:
    used = imported()
    asked = {name for extra in EXTRAS for name in names(extra)}
    assert len(asked) > 10
    assert {name for name in asked - OF_SPARK if MODULES.get(name, name) not in used} == set()


def test_all_is_every_extra() -> None:
    (everything,) = EXTRAS["all"]
    assert set(everything.removeprefix("penstock[").removesuffix("]").split(",")) == {*EXTRAS} - {"all"}


def test_the_readme_names_every_extra() -> None:
    (told,) = re.findall(r"# extras: (.*)", (ROOT / "README.md").read_text())
    assert set(re.split(r", (?:or )?", told)) == {*EXTRAS}
