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
def encode(
    ops: NDArray[np.uint8],
    flags: NDArray[np.uint16],
    times: NDArray[np.uint64],
    key_data: object,
    key_offsets: NDArray[np.int64],
    key_lengths: NDArray[np.int64],
    header_data: object,
    header_offsets: NDArray[np.int64],
    header_lengths: NDArray[np.int64],
    data: object,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out_offsets: NDArray[np.int64],
    out_lengths: NDArray[np.int64],
) -> bytes: ...
def split_headers(
    data: object,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    starts: NDArray[np.int64],
    spans: NDArray[np.int64],
) -> tuple[int, int]: ...
def join_headers(
    starts: NDArray[np.int64],
    name_data: object,
    name_offsets: NDArray[np.int64],
    name_lengths: NDArray[np.int64],
    value_data: object,
    value_offsets: NDArray[np.int64],
    value_lengths: NDArray[np.int64],
    out_offsets: NDArray[np.int64],
    out_lengths: NDArray[np.int64],
) -> bytes: ...
