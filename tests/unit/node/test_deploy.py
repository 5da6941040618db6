"""Files for other tools: they name metrics that exist, and the tools that are here accept them."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from penstock.metrics import REGISTRY
from penstock.mqtt.broker import Broker
from penstock.mqtt.sys import SysTopics

DEPLOY = Path(__file__).parents[3] / "deploy"
NAME = re.compile(r"penstock_[a-z0-9_]+")


def known() -> set[str]:
    for package in ("penstock.node", "penstock.ship", "penstock.fold", "penstock.mqtt", "penstock.channels"):
        module = importlib.import_module(package)
        for found in pkgutil.walk_packages(module.__path__, f"{package}."):
            importlib.import_module(found.name)
    broker = Broker()
    broker.counts.dropped["full"] = broker.counts.publish_received = broker.counts.publish_sent = 1
    SysTopics(broker, "1").publish()  # the broker's series are made when it has something to say
    names = {"penstock_build_info"}
    for metric in REGISTRY._metrics.values():
        base = metric.name if metric.name.startswith("penstock_") else f"penstock_{metric.name}"
        names.add(f"{base}_total" if metric.kind == "counter" else base)
    return names


@pytest.mark.parametrize("file", ["grafana/penstock.json", "prometheus/alerts.yml"])
def test_every_metric_that_is_named_exists(file: str) -> None:
    named = set(NAME.findall((DEPLOY / file).read_text(encoding="utf-8")))
    assert len(named) > 5
    assert named - known() == set()


def test_every_metric_that_a_page_names_exists() -> None:
    root = DEPLOY.parent
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    shown = re.compile(r"`(penstock_[a-z0-9_]+)[`{]")  # a whole name: penstock_mqtt_* is none
    named = {(page.name, name) for page in pages for name in shown.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 10
    names = known()
    assert {(page, name) for page, name in named if name not in names} == set()


def test_names_of_metrics_follow_the_rules() -> None:
    for metric in REGISTRY._metrics.values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name), metric.name
        assert not metric.name.endswith(("_total", "_ms", "_kb", "_millis")), metric.name


def test_the_dashboard_is_json_with_a_place_for_each_panel() -> None:
    board = json.loads((DEPLOY / "grafana/penstock.json").read_text(encoding="utf-8"))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places) == len(board["panels"]) > 8


def test_the_alert_rules_are_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"]
    assert all({"alert", "expr", "labels", "annotations"} <= set(rule) for rule in group["rules"])


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not on this machine")
    unit = tmp_path / "penstock.service"
    text = (DEPLOY / "systemd/penstock.service").read_text(encoding="utf-8")
    unit.write_text(text.replace("User=penstock", "User=root").replace("Group=penstock", "Group=root"))
    done = subprocess.run([tool, "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    ours = [line for line in done.stderr.splitlines() if "penstock" in line]
    assert (done.returncode, ours) == (0, []), done.stderr


def test_the_container_is_nobodys_with_one_volume_and_a_health_check() -> None:
    text = (DEPLOY / "container/Containerfile").read_text(encoding="utf-8")
    words = [line.split()[0] for line in text.splitlines() if line and not line[0].isspace() and line[0] != "#"]
    assert words.count("VOLUME") == words.count("HEALTHCHECK") == words.count("USER") == 1
    assert "USER penstock" in text


def test_the_container_is_built_from_the_sources_and_from_nothing_that_lies_about() -> None:
    """Without the list .venv went along: gigabytes, and kernels that were compiled for another Python."""
    root = DEPLOY.parent
    rules = [line for line in (root / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    taken = {rule[1:] for rule in rules if rule.startswith("!")}
    assert rules[0] == "*"
    assert rules[1 + len(taken) :] == ["**/*.so", "**/*.c", "**/__pycache__"]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    used = {"src", "setup.py", "pyproject.toml", "constraints.txt", project["readme"], *project["license-files"]}
    assert taken == used
    assert all((root / name).exists() for name in taken)
