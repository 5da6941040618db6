"""Folders that are made beside their place: what was left by a process that was killed goes, what is in use stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from penstock.disk.tree import LEFT_SECONDS, staged

CHILD = """
import sys, time
from penstock.disk.tree import staged
with staged(sys.argv[1], "export") as folder:
    open(folder + "/data", "w").close()
    print(folder, flush=True)
    time.sleep(600)
"""


def stages(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".penstock-")]


def make_old(path: Path | str) -> None:
    long_ago = os.stat(path).st_mtime - LEFT_SECONDS - 60
    os.utime(path, (long_ago, long_ago))


def test_what_a_killed_process_left_goes_and_what_is_in_use_stays(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, tmp_path / "a"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    left = Path(child.stdout.readline().strip())
    try:
        make_old(left)
        with staged(str(tmp_path / "b"), "export") as mine:
            make_old(mine)
            with staged(str(tmp_path / "c"), "export"):
                assert left.exists()
                assert os.path.exists(mine)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    with staged(str(tmp_path / "b"), "import"):
        assert left.exists()  # of another kind
    with staged(str(tmp_path / "b"), "export"):
        assert not left.exists()
    assert stages(tmp_path) == []


def test_what_is_young_or_no_folder_of_ours_stays(tmp_path: Path) -> None:
    for name in (".penstock-export-young", ".penstock-other-old", "old"):
        (tmp_path / name).mkdir()
    precious = tmp_path / "old" / "data"
    precious.write_bytes(b"1")
    (tmp_path / ".penstock-export-link").symlink_to(tmp_path / "old")
    make_old(tmp_path / "old")
    make_old(tmp_path / ".penstock-other-old")
    with staged(str(tmp_path / "b"), "export"):
        pass
    assert precious.read_bytes() == b"1"
    assert sorted(stages(tmp_path)) == [".penstock-export-link", ".penstock-export-young", ".penstock-other-old"]
