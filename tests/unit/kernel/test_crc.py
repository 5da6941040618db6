"""The CRC of the kernel is zlib's, at every length and alignment, whichever way it is computed."""

from __future__ import annotations

import random
import re
import zlib
from pathlib import Path

import pytest

import penstock.kernel
from penstock.kernel import encode_frame, encode_spans, native

POLYNOMIAL = 0x104C11DB7


def remainder(power: int) -> int:
    """Return x^power modulo the polynomial."""
    value = 1
    for _ in range(power):
        value <<= 1
        if value >> 32:
            value ^= POLYNOMIAL
    return value


def reflected(value: int, bits: int) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2)


@pytest.mark.parametrize("length", [*range(300), 4095, 4096, 4097, 65_536, 1 << 20])
def test_a_frame_carries_the_crc_that_zlib_computes(length):
    payload = random.Random(length).randbytes(length)
    assert encode_frame(payload)[4:8] == zlib.crc32(payload).to_bytes(4, "big")


def test_the_crc_does_not_depend_on_where_the_bytes_lie():
    import numpy as np

    data = random.Random(7).randbytes(400)
    for start in range(70):
        ends = np.empty(1, np.int64)
        frame = encode_spans(data, np.array([start]), np.array([300]), ends)
        assert frame[4:8] == zlib.crc32(data[start : start + 300]).to_bytes(4, "big")


@pytest.mark.skipif(not native, reason="there is no compiled kernel to look at")
def test_the_constants_of_the_folding_are_the_powers_they_are_said_to_be():
    text = Path(penstock.kernel.__file__).with_name("crc.pxd").read_text()
    found = dict(re.findall(r"__m128i (\w+) = _mm_set_epi64x\((.*)\);", text))
    by = {name: [int(part, 0) for part in value.split(",")] for name, value in found.items()}
    shifted = {power: reflected(remainder(power), 32) << 1 for power in (544, 480, 160, 96, 64)}
    quotient, rest = 0, 1 << 64
    while rest.bit_length() > 32:
        quotient |= 1 << (rest.bit_length() - 33)
        rest ^= POLYNOMIAL << (rest.bit_length() - 33)
    assert by == {
        "by512": [shifted[480], shifted[544]],
        "by128": [shifted[96], shifted[160]],
        "by64": [0, shifted[64]],
        "poly": [reflected(quotient, 33), reflected(POLYNOMIAL, 33)],
    }
