import numpy as np
from numpy.typing import NDArray

from penstock.types import KvUpdate

def sort_records(data: object, slots: NDArray[np.uint32], offsets: NDArray[np.int64], ordered: int) -> None: ...
def columns(data: object, offsets: NDArray[np.int64]) -> NDArray[np.int64]: ...
def copy_records(
    data: object, offsets: NDArray[np.int64], start: int, out: NDArray[np.uint8], lengths: NDArray[np.int64]
) -> tuple[int, int]: ...
def find_record(data: object, start: int, stop: int) -> int: ...
def last_cursor(data: object, start: int) -> int: ...
def encode(
    data: object,
    ops: NDArray[np.uint8],
    keys: NDArray[np.int64],
    key_lens: NDArray[np.int64],
    values: NDArray[np.int64],
    value_lens: NDArray[np.int64],
    versions: NDArray[np.int64],
    version_lens: NDArray[np.int64],
) -> bytearray: ...
def encode_list(updates: list[KvUpdate]) -> bytearray: ...
def pack_values(
    data: object,
    values: NDArray[np.int64],
    value_lens: NDArray[np.int64],
    versions: NDArray[np.int64],
    version_lens: NDArray[np.int64],
) -> list[bytes]: ...
def digest_values(keys: list[bytes], records: list[bytes | None]) -> tuple[int, int]: ...
