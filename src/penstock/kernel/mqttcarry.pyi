import numpy as np
from numpy.typing import NDArray

from penstock.kernel.mqtt import Run

def carry(
    runs: list[Run],
    headers: list[bytes],
    times: list[int],
    id_head: bytes,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> bytes: ...
