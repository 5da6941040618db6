import numpy as np
from numpy.typing import NDArray

from penstock.kernel.mqtt import Run
from penstock.kernel.xchannelwrite import Appender

def carry(
    runs: list[Run],
    headers: list[bytes],
    times: list[int],
    id_head: bytes,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> bytes: ...

class Carrier:
    last: int
    def __init__(self, runs: list[Run], headers: list[bytes], times: list[int], id_head: bytes) -> None: ...
    def fill(self, log: Appender) -> int: ...
