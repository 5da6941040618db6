import numpy as np
from numpy.typing import NDArray

def cut_run(data: object, start: int) -> tuple[int, int, int]: ...
def count_frames(data: object, limit: int) -> tuple[int, int]: ...
def decode(
    data: object,
    prefix: object,
    ops: NDArray[np.uint8],
    spans: NDArray[np.int64],
    sequences: NDArray[np.uint64],
    counts: NDArray[np.int64],
) -> int: ...
def parse_acks(
    data: object,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    sequences: NDArray[np.uint64],
    known: NDArray[np.uint8],
) -> None: ...
