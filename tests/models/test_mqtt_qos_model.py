"""Promise: QoS 1 delivers at least once, QoS 2 exactly once, in order, however often connections break."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from checker import explore
from mqtt_qos_model import Mutation, QosModel


def check(model: QosModel) -> dict[str, list[str]]:
    properties = {
        "once": model.once,
        "in order": model.in_order,
        "all delivered": model.all_delivered,
        "all forgotten": model.all_forgotten,
    }
    report = explore(model.initial(), model.steps, always=properties)
    assert report.states > 100
    return report.violations


@pytest.mark.parametrize("qos", [1, 2])
def test_the_exchange_holds_in_every_state(qos: int, long_run: bool) -> None:
    messages, window, breaks = (5, 3, 3) if long_run else (4, 2, 2)
    assert check(QosModel(qos, messages, window, breaks)) == {}


@pytest.mark.parametrize(
    ("qos", "mutation", "broken"),
    [
        (2, "the receiver forgets ids with the connection", "once"),
        (2, "a released message is published again", "once"),
        (2, "nothing is sent again", "all delivered"),
        (1, "nothing is sent again", "all delivered"),
        (1, "the receiver answers before it has taken", "all delivered"),
        (2, "an id is free at PUBREC", "all forgotten"),
        (2, "the old connection is heard", "once"),
    ],
)
def test_a_mutation_is_found(qos: int, mutation: Mutation, broken: str) -> None:
    assert broken in check(QosModel(qos, 3, 2, 2, mutation))
