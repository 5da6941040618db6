from typing import Any

import numpy as np
from numpy.typing import NDArray

def scan(data: Any, at: int, want: int, ordered: bool, columns: NDArray[np.int64]) -> tuple[int, int, int, int]: ...
def walk(data: Any, name: int, index: NDArray[np.uint8]) -> tuple[int, int, int, int, int, int, int, int, int, int]: ...
def find_entry(data: Any, at: int, low: int, high: int, budget: int) -> tuple[int, int]: ...
def encode_one(seq: int, ms: int, sender: Any, payload: Any) -> bytes: ...
def longest(payloads: list[Any]) -> int: ...
def encode_list(
    payloads: list[Any],
    start: int,
    sender: bytes,
    seq: int,
    ms: int,
    largest: int,
    chunk: int,
    offset: int,
    since: int,
    limit: int,
    name: int,
    index: NDArray[np.uint8],
) -> tuple[bytes, int, int, int]: ...
def encode_spans(
    data: Any,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    sender_data: Any,
    sender_offsets: NDArray[np.int64],
    sender_lengths: NDArray[np.int64],
    seqs: NDArray[np.uint64],
    times: NDArray[np.uint64],
    start: int,
    largest: int,
    chunk: int,
    offset: int,
    since: int,
    limit: int,
    name: int,
    index: NDArray[np.uint8],
) -> tuple[bytes, int, int, int]: ...
