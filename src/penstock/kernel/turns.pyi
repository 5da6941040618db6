from collections.abc import Callable, Sequence
from typing import Any

class Turns:
    time: Callable[[], float]
    read_at: float
    gathers: bool
    def __init__(self, loop: Any) -> None: ...
    def flush_later(self, connection: Any) -> None: ...
    def read_ended(self) -> None: ...
    def _flush(self) -> None: ...

class Wire:
    _turns: Any
    _transport: Any
    _receive: Callable[[bytes], None]
    _filters: tuple[Any, ...]
    _out: list[bytes | memoryview]
    _pending: int
    _high_water: int
    _queued: bool
    _closing: bool
    _lost: bool
    _slow: bool
    _last_read: float
    def __init__(self, turns: Turns, high_water: int) -> None: ...
    def write(self, data: bytes | memoryview) -> None: ...
    def write_many(self, chunks: Sequence[bytes | memoryview]) -> None: ...
    def flush(self) -> None: ...
    def data_received(self, data: bytes) -> None: ...
