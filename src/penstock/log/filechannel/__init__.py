"""filechannel: a durable queue in a folder of segments, with acknowledged receivers.

Byte-compatible with the folders of risingwavelabs/filechannel, in both directions.
"""

from penstock.log.filechannel.ack import AckReceiver
from penstock.log.filechannel.channel import FileChannel
from penstock.log.filechannel.group import DeadLetter, Group, GroupOptions, GroupStats, Job, Jobs
from penstock.log.filechannel.log import FileChannelLog
from penstock.log.filechannel.options import ChannelOptions
from penstock.log.filechannel.receiver import Receiver
from penstock.log.filechannel.sender import Sender
from penstock.log.filechannel.shared import SharedChannel
from penstock.log.filechannel.stats import ChannelStats
from penstock.log.filechannel.verify import repair
from penstock.log.filechannel.view import ChannelView

__all__ = [
    "FileChannel",
    "SharedChannel",
    "ChannelView",
    "ChannelOptions",
    "ChannelStats",
    "Sender",
    "Receiver",
    "AckReceiver",
    "Group",
    "GroupOptions",
    "GroupStats",
    "Job",
    "Jobs",
    "DeadLetter",
    "FileChannelLog",
    "repair",
]
