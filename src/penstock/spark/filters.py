"""Filters that a log can answer itself: on position, channel and kind.  Pure.

Spark hands over the parts of a condition that are joined by AND.  Those taken here are answered exactly, so Spark
does not look again; the rest stays with Spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.batch import Batch

__all__ = ["Condition", "Filters", "split_filters"]

OPS: Final = {
    "EqualTo": "eq",
    "EqualNullSafe": "eq",
    "GreaterThan": "gt",
    "GreaterThanOrEqual": "ge",
    "LessThan": "lt",
    "LessThanOrEqual": "le",
    "In": "in",
    "IsNotNull": "known",
    "StringStartsWith": "prefix",
}
TAKEN: Final = {
    "position": {"eq", "gt", "ge", "lt", "le", "in", "known"},
    "kind": {"eq", "gt", "ge", "lt", "le", "in", "known"},
    "channel": {"eq", "in", "prefix", "known"},
}
TOP: Final = (1 << 63) - 1


class Condition(msgspec.Struct, frozen=True):
    """One comparison of one column with a value."""

    column: str
    op: str
    value: Any = None


class Filters(msgspec.Struct, frozen=True):
    """Conditions that all hold for every record that is read.

    >>> Filters((Condition("position", "ge", 80), Condition("position", "lt", 200))).bounds
    (80, 199)
    >>> Filters((Condition("channel", "prefix", "site/"),)).channel_passes("lab/ticks")
    False
    """

    conditions: tuple[Condition, ...] = ()

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest position that can pass."""
        low, high = 0, TOP
        for condition in self.conditions:
            if condition.column != "position":
                continue
            value = condition.value
            match condition.op:
                case "eq":
                    low, high = max(low, value), min(high, value)
                case "in":
                    low, high = max(low, min(value, default=TOP)), min(high, max(value, default=-1))
                case "ge":
                    low = max(low, value)
                case "gt":
                    low = max(low, value + 1)
                case "le":
                    high = min(high, value)
                case "lt":
                    high = min(high, value - 1)
        return low, high

    def channel_passes(self, name: str) -> bool:
        """Whether the channel of this name can have records that pass."""
        for condition in self.conditions:
            if condition.column == "channel" and not (
                condition.op == "known"
                or (condition.op == "eq" and name == condition.value)
                or (condition.op == "in" and name in condition.value)
                or (condition.op == "prefix" and name.startswith(condition.value))
            ):
                return False
        return True

    def apply(self, batch: Batch) -> Batch:
        """Return the records that pass.

        >>> batch = Batch.of([b"a", b"b", b"c"], kinds=[1, 2, 1])
        >>> Filters((Condition("kind", "eq", 1),)).apply(batch).to_payloads()
        [b'a', b'c']
        """
        keep: NDArray[np.bool_] | None = None
        for condition in self.conditions:
            if condition.column == "channel" or (condition.column, condition.op) == ("position", "known"):
                continue
            values = batch.positions if condition.column == "position" else batch.kinds
            passed = _compare(values, condition, len(batch))
            keep = passed if keep is None else keep & passed
        return batch if keep is None or keep.all() else batch.filter(keep)


def split_filters(filters: Iterable[Any]) -> tuple[Filters, list[Any]]:
    """Return what is answered here and what Spark has to check itself; the latter are Spark's own objects."""
    taken, rest = [], []
    for item in filters:
        condition = _condition(item)
        if condition is None:
            rest.append(item)
        else:
            taken.append(condition)
    return Filters(tuple(taken)), rest


def _condition(item: Any) -> Condition | None:
    op = OPS.get(type(item).__name__)
    name = item.attribute[0] if len(getattr(item, "attribute", ())) == 1 else None
    if op is None or name is None or op not in TAKEN.get(name, ()):
        return None
    value: Any = getattr(item, "value", None)
    if op == "in":
        value = tuple(each for each in value if each is not None)
    elif op != "known" and value is None:
        return None
    return Condition(name, op, value)


def _compare(values: NDArray[Any] | None, condition: Condition, count: int) -> NDArray[np.bool_]:
    if values is None:  # a format without kinds: null equals nothing
        return np.zeros(count, np.bool_)
    wide = values.astype(np.int64, copy=False)
    found: NDArray[np.bool_] = np.ones(count, np.bool_)
    match condition.op:
        case "eq":
            found = wide == condition.value
        case "in":
            found = np.isin(wide, np.array(condition.value, np.int64))
        case "gt":
            found = wide > condition.value
        case "ge":
            found = wide >= condition.value
        case "lt":
            found = wide < condition.value
        case "le":
            found = wide <= condition.value
    return found
