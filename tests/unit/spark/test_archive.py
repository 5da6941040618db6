"""The archive of Spark's classes: where it is, and that sessions use the home it was made with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.spark.archive import archive_of, make_home, shared_home
from penstock.spark.session import launch_environment


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    return tmp_path / "environment"


def test_the_name_follows_from_the_java(prefix: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.touch(), second.touch()
    found = archive_of(str(first))
    assert Path(found).parent == prefix / "share" / "penstock"
    assert archive_of(str(first)) == found != archive_of(str(second))
    os.utime(first, (1, 1))  # another Java at the same place
    assert archive_of(str(first)) != found


def test_links_that_lead_elsewhere_are_replaced(tmp_path: Path) -> None:
    home = tmp_path / "spark"
    home.mkdir()
    (home / "jars").symlink_to(tmp_path / "gone")
    make_home(str(home))
    make_home(str(home))
    assert {path.name for path in home.iterdir()} == {"bin", "jars"}
    assert list((home / "jars").glob("spark-core*.jar"))


def test_a_session_uses_the_home_of_the_archive_where_there_is_one(prefix: Path, tmp_path: Path) -> None:
    own = launch_environment(str(tmp_path))["SPARK_HOME"]
    assert Path(own) == tmp_path / "spark"
    make_home(shared_home())
    assert launch_environment(str(tmp_path))["SPARK_HOME"] == shared_home()
