"""The hot loops, compiled where there is a compiler and in plain Python where there is none.

``native`` says which one this process runs, ``reason`` why it is not the compiled one.  Both have the
same functions; only the compiled one promises an order between processes, so without it a live mmap
log refuses to open while sealed files and everything else work.

>>> from penstock import kernel
>>> kernel.native or bool(kernel.reason)
True
"""

from __future__ import annotations

__all__ = [
    "native",
    "reason",
    "Mapping",
    "Cursor",
    "Taker",
    "load_counts",
    "total_bytes",
    "gather_spans",
    "to_bytes_list",
    "binary_views",
    "decode_envelopes",
    "encode_envelopes",
    "split_headers",
    "join_headers",
    "messagelog",
    "Fold",
    "pgss",
    "lmdbtree",
    "natswire",
    "mqtt",
    "mqttcarry",
    "mqttrelay",
    "channelwire",
    "rockslog",
    "turns",
    "wsframes",
    "encode_frame",
    "encode_list",
    "frame_ends",
    "encode_spans",
    "scan_frames",
    "hop_frames",
]

native = True
reason = ""

try:
    from penstock.kernel import (
        ahead as ahead,  # ahead, saves, tail and xchannelwrite have no twin
        channelwire,
        envelope,
        filechannel,
        foldindex,
        gather,
        lmdbtree,
        maps,
        messagelog,
        mqtt,
        mqttcarry,
        mqttrelay,
        natswire,
        pgss,
        rockslog,
        saves as saves,
        tail as tail,
        turns,
        wsframes,
        xchannel,
        xchannelwrite as xchannelwrite,
    )
except ImportError as exc:
    native = False
    reason = f"the compiled kernel is not installed ({exc})"
    from penstock.kernel.twin import (  # type: ignore[no-redef]
        channelwire,
        envelope,
        filechannel,
        foldindex,
        gather,
        lmdbtree,
        maps,
        messagelog,
        mqtt,
        mqttcarry,
        mqttrelay,
        natswire,
        pgss,
        rockslog,
        turns,
        wsframes,
        xchannel,
    )

Mapping = maps.Mapping
Cursor = xchannel.Cursor
Taker = xchannel.Taker
load_counts = xchannel.load_counts
total_bytes = gather.total_bytes
gather_spans = gather.gather
to_bytes_list = gather.to_bytes_list
binary_views = gather.binary_views
decode_envelopes = envelope.decode
encode_envelopes = envelope.encode
split_headers = envelope.split_headers
join_headers = envelope.join_headers
Fold = foldindex.Fold
encode_frame = filechannel.encode_frame
encode_list = filechannel.encode_list
frame_ends = filechannel.frame_ends
encode_spans = filechannel.encode_spans
scan_frames = filechannel.scan
hop_frames = filechannel.hop
