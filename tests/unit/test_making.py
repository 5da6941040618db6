"""Promise: folders and files are made for their owner alone, through one door (disk/plain.py, disk/posix.py)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent
FREE = {
    "disk/posix.py", "disk/plain.py",  # the door itself
    "net/private.py",  # replaces small secrets, with their mode
    "spark/lake/compaction.py", "spark/source/export.py",  # a lake has the mode of its umask
    "spark/scratch.py", "spark/session.py", "cli/demo_run.py", "cli/demo_node.py",
    "cli/demo_spark.py",  # in a folder of mkdtemp
}  # fmt: skip


def makes(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that make a folder or a file with the mode of the umask, in it or in folders above it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        plain = name.endswith((".write_text", ".write_bytes", ".touch", ".mkdir")) and "committer" not in name
        if name == "os.makedirs" or (plain and name != "os.mkdir"):
            yield node
        if name == "os.mkdir" and len(node.args) < 2:
            yield node
        if name in ("open", "io.open") and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            made = set(str(node.args[1].value)) & set("wax")
            opened = isinstance(node.args[0], ast.Call) or any(word.arg == "opener" for word in node.keywords)
            if made and not opened:
                yield node


def test_nothing_is_made_with_the_mode_of_the_umask() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name not in FREE and not name.startswith("testing/"):
            found += [f"{name}:{call.lineno}: {ast.unparse(call)}" for call in makes(ast.parse(path.read_text()))]
    assert found == []


def test_a_call_that_makes_something_is_seen() -> None:
    calls = "os.makedirs(a)", "os.mkdir(a)", "open(a, 'w')", "open(a, 'xb')", "Path(a).write_text(b)", "Path(a).mkdir()"
    for call in calls:
        assert list(makes(ast.parse(call))), call
    for call in ("os.mkdir(a, 0o700)", "open(a)", "open(a, 'rb')", "open(a, 'ab', opener=private)"):
        assert not list(makes(ast.parse(call))), call
