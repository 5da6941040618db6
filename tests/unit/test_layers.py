"""Promise: a folder imports only from floors below it (docs/architecture.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent
FLOORS = {
    "errors": 0, "types": 0, "batch": 0, "metrics": 0, "clock": 0, "options": 0, "lifecycle": 0, "shown": 0,
    "kernel": 0, "disk": 1, "log": 2, "store": 3, "kv": 4, "fold": 5, "artifact": 6, "ship": 6, "net": 6,
    "mqtt": 7, "channels": 7, "spark": 8, "node": 9, "cli": 10,
}  # fmt: skip
EVERYWHERE = {"testing", "__init__"}


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "penstock":
                found.update(f"penstock.{name.name}" for name in node.names)
            else:
                found.add(node.module)
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}: relative imports hide their direction")
    return {name for name in found if name == "penstock" or name.startswith("penstock.")}


def test_every_folder_has_a_floor() -> None:
    rooms = {path.stem if path.is_file() else path.name for path in ROOT.iterdir() if not path.name.endswith(".typed")}
    assert rooms - {"__pycache__"} <= FLOORS.keys() | EVERYWHERE


def test_a_folder_imports_only_from_floors_below_it() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        own = room("penstock." + ".".join(path.relative_to(ROOT).with_suffix("").parts))
        if own in EVERYWHERE:
            continue
        for name in imports(path):
            target = room(name)
            if target == own:
                continue
            if target in EVERYWHERE or FLOORS[target] > FLOORS[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
            elif FLOORS[target] == FLOORS[own] and FLOORS[own] > 0:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}, which is on its own floor")
    assert not wrong
