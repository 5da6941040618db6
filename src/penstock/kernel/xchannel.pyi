from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernel.maps import Mapping
from penstock.types import Record

class Cursor:
    at: int
    stop: int
    status: int
    stray: int
    window_position: int
    window: Any
    @property
    def position(self) -> int: ...
    def attach(self, window: Any, at: int, stop: int, region: int, window_position: int) -> None: ...
    def detach(self) -> None: ...
    def extend(self, stop: int) -> None: ...
    def ready(self) -> bool: ...
    def next(self) -> Record | None: ...
    def scan(
        self,
        limit: int,
        span: int,
        positions: NDArray[np.int64],
        timestamps: NDArray[np.uint64],
        kinds: NDArray[np.uint16],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> int: ...
    def walk(self, until: int = -1) -> tuple[int, int]: ...
    def spin(self, nanoseconds: int) -> bool: ...

def load_counts(head: Mapping) -> tuple[int, int]: ...
