"""Edge nodes that ship under hardship: what fails, and where a shipper dies."""

from __future__ import annotations

import random
from typing import Any

from penstock.disk.objectstore import Tag
from penstock.errors import RetryError

POINTS = ["put.before", "put.after", "swap.before", "swap.after", "cursor.before", "cursor.after", "page.after"]


class Killed(BaseException):
    pass


class Flaky:
    """A store that fails one time in ten, half of the time after it did what it was asked to."""

    def __init__(self, store: Any, chance: random.Random) -> None:
        self._store, self._chance = store, chance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _maybe(self, call: Any, *arguments: Any) -> Any:
        fate = self._chance.random()
        if fate < 0.05:
            raise RetryError("lost before the server")
        answer = call(*arguments)
        if fate > 0.95:
            raise RetryError("the answer was lost")
        return answer

    def put(self, key: str, data: Any) -> None:
        self._maybe(self._store.put, key, data)

    def create(self, key: str, data: bytes) -> Tag:
        return self._maybe(self._store.create, key, data)  # type: ignore[no-any-return]

    def swap(self, key: str, data: bytes, tag: Tag) -> Tag:
        return self._maybe(self._store.swap, key, data, tag)  # type: ignore[no-any-return]
