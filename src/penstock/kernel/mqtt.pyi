from collections.abc import Iterable
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

@final
class Run:
    data: bytes
    topic: bytes
    forward: bytes
    start: int
    end: int
    count: int
    longest: int
    payload_bytes: int
    qos: int
    first_id: int
    alias: int
    expiry: int
    retain: bool
    dup: bool
    version5: bool
    plain: bool
    deadline: float
    def wire(self, version5: bool) -> bytes | memoryview | None: ...
    def packets(self) -> bytes | memoryview: ...
    def frames(self, version5: bool, flags: int, topic: bytes, properties: bytes, first_id: int) -> bytes: ...
    def split(self, count: int) -> tuple[Run, Run]: ...
    def deal(self, hands: int) -> list[Run]: ...
    def detached(self) -> Run: ...
    def payload(self, index: int = 0) -> bytes: ...
    def payloads(self) -> list[bytes]: ...
    def spans(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> None: ...

Item: TypeAlias = Run | tuple[int, int, int, int]

def cut(
    data: bytes, start: int, version5: bool, limit: int, most: int = 0, from_server: bool = False
) -> tuple[list[Item], int, int, tuple[int, int, str] | None]: ...
def ack_run(first: int, first_id: int, count: int, reason: int = 0) -> bytes: ...
def make_run(
    topic: bytes, payloads: Iterable[bytes], qos: int, retain: bool, forward: bytes = b"", expiry: int = -1
) -> Run: ...
def properties(data: bytes, start: int, end: int) -> list[tuple[int, int | str | bytes | tuple[str, str]]] | None: ...
