"""What tests of the queue share: options, and reading a receiver to its present end."""

from __future__ import annotations

from penstock.log.filechannel import AckReceiver, ChannelOptions, FileChannel, Receiver

FAST = ChannelOptions(sync="none", compression="none")
SMALL = ChannelOptions(sync="none", segment_bytes=500)


def drain(rx: Receiver | AckReceiver) -> list[bytes]:
    return [payload for batch in rx.batches(timeout=0) for payload in batch.to_payloads()]


def lose_power(channel: FileChannel, *readers: AckReceiver) -> None:
    """Leave a queue as a machine without power does; the group commit would keep its disk until a sync is due."""
    committer = channel._spool._committer
    for reader in readers:
        reader.forked()
    channel.forked()
    if committer is not None:
        committer.close()
