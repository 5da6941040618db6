"""Floor 1: the seam to the file system, and what everyone needs on top of it.

Nothing above this floor calls ``os`` to open, write, rename or sync a file.  That is what lets the same
code run on a folder, in memory, on a disk that loses power, and on whatever else can list and read.
"""

from penstock.disk.atomic import Replacement, save_atomically, save_many_atomically
from penstock.disk.bulk import exist_many, read_many
from penstock.disk.commit import Committer, GroupCommit
from penstock.disk.executor import disk_executor, doze_in_thread, in_disk_thread, in_waiting_thread
from penstock.disk.face import Disk, File, Latch, Lock, ReadDisk, ReadFile, Stat
from penstock.disk.handle import ClosingHandle, Handle
from penstock.disk.memory import MemoryDisk
from penstock.disk.objects import view_of
from penstock.disk.objectstore import ObjectOptions, ObjectStore
from penstock.disk.own import Owned
from penstock.disk.posix import PosixDisk
from penstock.disk.resolve import disk_for, is_url, object_store_for, read_disk_for
from penstock.disk.threads import Threads, start_thread
from penstock.disk.turns import Turns
from penstock.disk.wait import Backoff, FolderWait, LoopWait, when_there

__all__ = [
    "Disk",
    "File",
    "ReadDisk",
    "ReadFile",
    "Stat",
    "Lock",
    "Latch",
    "Owned",
    "PosixDisk",
    "disk_for",
    "read_disk_for",
    "is_url",
    "object_store_for",
    "ObjectStore",
    "ObjectOptions",
    "view_of",
    "MemoryDisk",
    "save_atomically",
    "save_many_atomically",
    "Replacement",
    "exist_many",
    "read_many",
    "GroupCommit",
    "Committer",
    "Backoff",
    "FolderWait",
    "LoopWait",
    "Turns",
    "disk_executor",
    "in_disk_thread",
    "doze_in_thread",
    "in_waiting_thread",
    "Threads",
    "start_thread",
    "Handle",
    "ClosingHandle",
    "when_there",
]
