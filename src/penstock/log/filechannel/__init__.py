"""filechannel: a durable queue in a folder of segments, with acknowledged receivers.

Byte-compatible with the folders of risingwavelabs/filechannel, in both directions.
"""

from penstock.log.filechannel.ack import AckReceiver
from penstock.log.filechannel.channel import ChannelStats, FileChannel
from penstock.log.filechannel.log import FileChannelLog
from penstock.log.filechannel.options import ChannelOptions
from penstock.log.filechannel.receiver import Receiver
from penstock.log.filechannel.sender import Sender
from penstock.log.filechannel.verify import repair
from penstock.log.filechannel.view import ChannelView

__all__ = [
    "FileChannel",
    "ChannelView",
    "ChannelOptions",
    "ChannelStats",
    "Sender",
    "Receiver",
    "AckReceiver",
    "FileChannelLog",
    "repair",
]
