"""Fuzz the decoder of NATS messages: any bytes, never a crash, and the same answer as the plain twin.

python fuzz/nats_decode.py --inputs 100000 --seed 1
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from _run import main
from penstock.kernel import natswire
from penstock.kernel.twin import natswire as twin

ROWS = 16
PIECES = [
    b"MSG $KV.b.k 1 $JS.ACK.KV_b.c.1.7.1.0.3 5\r\nhello\r\n",
    b"MSG $KV.b.a.b 1 $JS.ACK.d.a.KV_b.c.1.18446744073709551615.2.0.0.x 0\r\n\r\n",
    b"HMSG $KV.b.k 1 $JS.ACK.KV_b.c.1.8.2.0.2 33 33\r\nNATS/1.0\r\nKV-Operation: PURGE\r\n\r\n\r\n",
    b"HMSG _INBOX.x 1 43 43\r\nNATS/1.0 100 Idle Heartbeat\r\nA: 0123456\r\n\r\n\r\n",
    b"PING\r\n",
    b"-ERR 'x'\r\n",
]


def one_input(rng: random.Random) -> bytes:
    """Return messages with some damage."""
    data = bytearray(b"".join(rng.choices(PIECES, k=rng.randrange(1, 6))))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at:at] = bytes(rng.choices(b" .:\r\n0129+$HM", k=rng.randrange(1, 5)))
            case 1:
                del data[at : at + rng.randrange(6)]
            case 2 if at < len(data):
                data[at] = rng.randrange(256)
            case _:
                del data[at:]
        if not data:
            break
    return bytes(data)


def answers(side: Any, data: bytes) -> tuple[Any, ...]:
    """Return everything one side says about these bytes."""
    ops, spans = np.zeros(ROWS, np.uint8), np.zeros((ROWS, 4), np.int64)
    sequences, counts = np.zeros((ROWS, 2), np.uint64), np.zeros((ROWS, 3), np.int64)
    rows = side.decode(data, b"$KV.b.", ops, spans, sequences, counts)
    columns = [column.tolist() for column in (ops, spans, sequences, counts)]
    return rows, *columns, side.cut_run(data, 0), side.count_frames(data, ROWS)


def run(inputs: int, seed: int) -> None:
    """Try that many inputs."""
    rng = random.Random(seed)
    for number in range(inputs):
        data = one_input(rng)
        mine = answers(natswire, data)
        if number % 8 == 0:  # the twin is slow: every eighth
            assert mine == answers(twin, data), f"the kernels differ on {data!r}"


if __name__ == "__main__":
    main(__doc__, run)
