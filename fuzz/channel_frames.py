"""Lines and reads of the channel protocol, mutated: both kernels agree, nothing raises, what is good comes out again.

python fuzz/channel_frames.py [--inputs N] [--seed N]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _run import main
from penstock import kernel
from penstock.channels.wire.cutter import Cutter, Fault, cut_client_run
from penstock.channels.wire.frames import BadLine, decode_line, encode_frame
from penstock.errors import OptionsError
from penstock.kernel.twin import channelwire as twin

SEEDS = [
    b"CONNECT heartbeat_interval=60000 version=1\n",
    b"BROADCAST id=9 channel=!ops/east@localhost length=3 qos=1\nhi!\n" * 3,
    b"MESSAGE channel=!ops@localhost from=ann@localhost length=3 seq=7 timestamp=1767225600000\nhi!\n" * 2,
    b"BROADCAST_ACK id=9 seq=7\nBROADCAST_ACK id=10 seq=8\n",
    b"SET_CHAN_ACL id=4 action=add channel=!ops/east@localhost nids:2=ann@localhost example.com type=read\n",
    b'ERROR id=4 detail=\\"ACL allow list exceeds max entries\\" reason=POLICY_VIOLATION\n',
    b"S2M_FORWARD_BROADCAST_PAYLOAD_ACK id=1 altered_payload=true altered_payload_length=3 valid=true\nabc\n",
    b"HISTORY id=12 channel=!ops/east@localhost from_seq=7 history_id=h12 limit=50\n",
]
TOKENS = [
    b"=",
    b":",
    b"\\",
    b'"',
    b"\n",
    b"\0",
    b" ",
    b"\t",
    b"\xff",
    b"+",
    b"0",
    b"4294967296",
    b":0=",
    b'\\"',
    b"id=",
]


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with a few changes."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0 if out:
                out[min(at, len(out) - 1)] = rng.randrange(256)
            case 1:
                del out[at : at + rng.randrange(1, 8)]
            case 2:
                out[at:at] = rng.choice(TOKENS)
            case 3:
                out[at:at] = out[: rng.randrange(1, 30)]
            case _:
                out = out[: at or 1]
    return bytes(out)


def run(inputs: int, seed: int) -> str | None:
    """Try so many inputs."""
    rng = random.Random(seed)
    good = 0
    for _ in range(inputs):
        data = mutate(rng, rng.choice(SEEDS))
        line = data.partition(b"\n")[0]
        assert kernel.channelwire.tokenize(line) == twin.tokenize(line), line
        assert kernel.channelwire.cut_broadcasts(data, 0, 512, 64) == twin.cut_broadcasts(data, 0, 512, 64), data
        assert kernel.channelwire.cut_messages(data, 0, 512, 64) == twin.cut_messages(data, 0, 512, 64), data
        assert kernel.channelwire.cut_acks(data, 0, 512) == twin.cut_acks(data, 0, 512), data
        for cutter in (Cutter(512, 64), Cutter(512, 64, cut_client_run)):
            items = cutter.feed(data)
            assert not any(isinstance(item, Fault) for item in items[:-1]), data
        try:
            frame = decode_line(line)
            again = encode_frame(frame.name, frame.fields)
        except (BadLine, OptionsError):
            continue
        if b'\\"\\"' not in again and not any(b"\n" in part or b"\0" in part for part in (line,)):
            try:
                assert decode_line(again[:-1]).fields == frame.fields, line
            except BadLine:
                assert b"\\" in line, line  # a value that ends in a backslash cannot be written again
        good += 1
    assert good or inputs < 100
    return None


if __name__ == "__main__":
    main(__doc__, run)
