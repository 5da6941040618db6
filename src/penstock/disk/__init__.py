"""Floor 1: the seam to the file system, and what everyone needs on top of it.

Nothing above this floor calls ``os`` to open, write, rename or sync a file.  That is what lets the same
code run on a folder, in memory, on a disk that loses power, and on whatever else can list and read.
"""

from penstock.disk.atomic import Replacement, save_atomically, save_many_atomically
from penstock.disk.bulk import exist_many, read_many
from penstock.disk.commit import Committer, GroupCommit
from penstock.disk.face import Disk, File, Latch, Lock, ReadDisk, ReadFile, Stat
from penstock.disk.faulty import FaultyDisk
from penstock.disk.handle import ClosingHandle, Handle
from penstock.disk.memory import MemoryDisk
from penstock.disk.posix import PosixDisk
from penstock.disk.wait import Backoff

__all__ = [
    "Disk",
    "File",
    "ReadDisk",
    "ReadFile",
    "Stat",
    "Lock",
    "Latch",
    "PosixDisk",
    "MemoryDisk",
    "FaultyDisk",
    "save_atomically",
    "save_many_atomically",
    "Replacement",
    "exist_many",
    "read_many",
    "GroupCommit",
    "Committer",
    "Backoff",
    "Handle",
    "ClosingHandle",
]
