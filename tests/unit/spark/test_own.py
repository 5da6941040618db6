"""A user's function as a pipeline: found by name, called with what it asks for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import OptionsError, PenstockError
from penstock.spark.pipelines.own import PipelineJob, arguments_of, find_function, run

GIVEN = {"frame": lambda: "frame", "spark": lambda: "spark", "on_progress": lambda: "show", "options": dict}


def given(function: Any, **job: Any) -> dict[str, Any]:
    return arguments_of(function, PipelineJob(source="data", **job), GIVEN)


def test_the_first_parameter_is_the_source_whatever_its_name() -> None:
    assert given(lambda readings: None) == {"readings": "frame"}
    assert given(lambda frame: None) == {"frame": "frame"}


def test_parameters_get_what_they_name() -> None:
    def pipeline(spark: Any, channels: str, table: str, checkpoint: str, *, on_progress: Any = None) -> None: ...

    assert given(pipeline, table="lake/t", checkpoint="c") == {
        "spark": "spark",
        "channels": "data",
        "table": "lake/t",
        "checkpoint": "c",
        "on_progress": "show",
    }
    with pytest.raises(OptionsError, match="pipeline needs a table"):
        given(pipeline)


def test_settings_have_the_type_of_their_parameter() -> None:
    def pipeline(frame: Any, limit: int = 3, share: float = 0.5, by: tuple[str, ...] = (), name: str = "") -> None: ...

    settings = {"limit": "7", "share": "0.25", "by": '["channel", "key"]', "name": "7"}
    found = given(pipeline, settings=settings)
    assert found == {"frame": "frame", "limit": 7, "share": 0.25, "by": ("channel", "key"), "name": "7"}
    with pytest.raises(OptionsError, match="limit='many': Expected `int`, got `str`"):
        given(pipeline, settings={"limit": "many"})
    with pytest.raises(OptionsError, match=r"by='\[7\]': Expected `str`, got `int`"):
        given(pipeline, settings={"by": "[7]"})


def test_a_setting_that_is_missing_or_unknown_is_named() -> None:
    def pipeline(frame: Any, schema: str) -> None: ...

    with pytest.raises(OptionsError, match="needs schema: give it with --set schema="):
        given(pipeline)
    with pytest.raises(OptionsError, match="has no setting scheme"):
        given(pipeline, settings={"scheme": "x"})
    with pytest.raises(OptionsError, match="has no setting frame"):
        given(pipeline, settings={"frame": "x"})


def test_what_nobody_asks_for_is_not_made() -> None:
    def never() -> Any:
        raise AssertionError

    assert arguments_of(lambda spark: None, PipelineJob(source="x"), {**GIVEN, "frame": never}) == {"spark": "spark"}


def test_functions_are_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_pipelines_here.py").write_text("def hottest(frame): return frame\nnot_one = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert find_function("own_pipelines_here:hottest")("x") == "x"
    with pytest.raises(OptionsError, match="has no function coldest"):
        find_function("own_pipelines_here:coldest")
    with pytest.raises(OptionsError, match="it is no function"):
        find_function("own_pipelines_here:not_one")
    with pytest.raises(OptionsError, match="does not say what it takes"):
        find_function("builtins:max")
    (tmp_path / "own_pipelines_torn.py").write_text("def hottest(frame:\n")
    with pytest.raises(OptionsError, match=r"own_pipelines_torn.py, line 1"):
        find_function("own_pipelines_torn:hottest")


def test_an_error_in_a_function_is_one_line_that_names_its_place() -> None:
    def broken() -> float:
        return 1 / 0

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(PenstockError, match=rf"broken: ZeroDivisionError: .* \(test_own.py, line {line}\)"):
        run(None, broken, PipelineJob(source="data"))  # type: ignore[arg-type]


def test_a_table_that_gets_nothing_is_an_error() -> None:
    with pytest.raises(OptionsError, match=r"seven gave no DataFrame: there is nothing to put into lake/t"):
        run(None, seven, PipelineJob(source="data", table="lake/t"))  # type: ignore[arg-type]
    assert run(None, seven, PipelineJob(source="data")) == 7  # type: ignore[arg-type]


def seven() -> int:
    return 7


def test_a_pipeline_of_our_own_is_found_by_its_name() -> None:
    assert find_function("aggregate").__module__ == "penstock.spark.pipelines.aggregate"
    for name in ("nothing", "page"):
        with pytest.raises(OptionsError, match=f"{name}: not one of aggregate, .*module:function"):
            find_function(name)
    with pytest.raises(OptionsError, match="there is no module"):
        find_function("no.such.module:f")


def test_a_module_that_misses_one_of_its_own_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_broken_pipeline.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        find_function("own_broken_pipeline:f")
