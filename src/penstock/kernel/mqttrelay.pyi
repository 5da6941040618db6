from collections.abc import Callable
from typing import Any

class Traffic:
    bytes_received: int
    messages_received: int
    publish_received: int
    publish_bytes_received: int
    bytes_sent: int
    messages_sent: int
    publish_sent: int
    publish_bytes_sent: int

class Sink:
    write: Callable[[bytes | memoryview], None]
    version5: bool
    plain_payload: int
    _limit: int
    _counts: Any
    _short: WayCache | None
    def received(self, data: bytes) -> None: ...

class Outlet:
    link: Any
    ready: bool
    delivered: int

class Way:
    outlets: tuple[Any, ...] | None

class CachedWay:
    plan: Any
    version: int
    def __init__(self, plan: Way, version: int) -> None: ...

class WayCache:
    _young: dict[bytes, CachedWay]
    _version: int

def relay(data: bytes, version5: bool, limit: int, routes: WayCache, counts: Traffic) -> bool: ...
