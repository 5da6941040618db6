import numpy as np
from numpy.typing import NDArray

def decode(
    data: object,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    ops: NDArray[np.uint8],
    flags: NDArray[np.uint16],
    times: NDArray[np.uint64],
    spans: NDArray[np.int64],
) -> int: ...
