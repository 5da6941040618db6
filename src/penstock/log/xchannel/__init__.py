"""xchannel: one writer, many readers, messages in memory-mapped files that outlive them all.

Byte-compatible with the files of xchannel 2.0.0, live in both directions.
"""

from penstock.log.xchannel.log import XChannelLog
from penstock.log.xchannel.options import WriterOptions
from penstock.log.xchannel.reader import Reader
from penstock.log.xchannel.remove import cleanup
from penstock.log.xchannel.writer import Reservation, Writer

__all__ = ["Writer", "Reader", "XChannelLog", "WriterOptions", "Reservation", "cleanup"]
