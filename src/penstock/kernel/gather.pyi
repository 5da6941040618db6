import numpy as np
from numpy.typing import NDArray

def total_bytes(size: int, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> int: ...
def gather(
    data: object,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out: NDArray[np.uint8],
    starts: NDArray[np.int64],
) -> None: ...
def to_bytes_list(data: object, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[bytes]: ...
def binary_views(
    data: object,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    origin: int,
    out: NDArray[np.uint8],
) -> None: ...
