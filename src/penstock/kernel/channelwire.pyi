# ruff: noqa: PYI021
"""The lines of the channel protocol; the extension and the twin are typed against this."""

def tokenize(line: bytes) -> tuple[bytes | None, list[tuple[bytes, bytes]], bool]:
    """Return the name of a message (None if there is none), its parameters in order, and whether the line is whole."""

def cut_broadcasts(
    data: bytes, at: int, max_line: int, max_payload: int
) -> tuple[bytes, int, bytes, list[bytes], bytes, int] | None:
    """Cut a run of plain BROADCASTs on one channel with one QoS from ``at`` on; None when the next frame is not one.

    Return the channel, the QoS, the ids (32 bits each), the payloads, the size of each frame as limits count it (32
    bits each) and where the run ends.
    """

def cut_messages(
    data: bytes, at: int, max_line: int, max_payload: int
) -> tuple[bytes, bytes, int, int, list[bytes], int] | None:
    """Cut a run of plain MESSAGEs of one sender on one channel and time, numbered in a row; None if none is next.

    Return the channel, the sender, the first number, the time, the payloads and where the run ends.
    """

def cut_acks(data: bytes, at: int, max_line: int) -> tuple[list[int], list[int], int] | None:
    """Cut a run of BROADCAST_ACKs into ids and numbers, and where it ends; None when the next frame is not one."""

def encode_acks(ids: bytes, first_seq: int) -> bytes:
    """Return BROADCAST_ACKs for these ids (32 bits each), with numbers in a row."""

def encode_messages(head: bytes, first_seq: int, timestamp: int, payloads: tuple[bytes, ...]) -> bytes:
    """Return MESSAGEs with numbers in a row; ``head`` is the line up to and with ``length=``."""

def encode_broadcasts(first_id: int, head: bytes, tail: bytes, payloads: tuple[bytes, ...]) -> bytes:
    """Return BROADCASTs with ids in a row; ``head`` is `` channel=… length=`` and ``tail`` what follows the length."""
