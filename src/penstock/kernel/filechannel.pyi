import numpy as np
from numpy.typing import NDArray

def encode_frame(payload: object) -> bytes: ...
def encode_list(payloads: list[bytes], ends: NDArray[np.int64]) -> bytes: ...
def encode_spans(
    data: object, offsets: NDArray[np.int64], lengths: NDArray[np.int64], ends: NDArray[np.int64]
) -> bytes: ...
def scan(
    data: object,
    start: int,
    stop: int,
    base: int,
    positions: NDArray[np.int64],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> tuple[int, int, int]: ...
def hop(data: object, start: int, stop: int, target: int) -> int: ...
