"""Every disk passes the one suite of penstock.testing."""

from __future__ import annotations

from pathlib import Path

from penstock.disk import Disk, MemoryDisk, PosixDisk
from penstock.testing.disk_conformance import DiskConformance
from penstock.testing.faulty import FaultyDisk


class TestPosixDisk(DiskConformance):
    def make(self, folder: Path) -> tuple[Disk, str]:
        return PosixDisk(), str(folder)


class TestMemoryDisk(DiskConformance):
    def make(self, folder: Path) -> tuple[Disk, str]:
        disk = MemoryDisk()
        disk.make_folder("data")
        return disk, "data"


class TestFaultyPosixDisk(DiskConformance):
    def make(self, folder: Path) -> tuple[Disk, str]:
        return FaultyDisk(PosixDisk()), str(folder)


class TestFaultyMemoryDisk(DiskConformance):
    def make(self, folder: Path) -> tuple[Disk, str]:
        disk = FaultyDisk(MemoryDisk())
        disk.make_folder("data")
        return disk, "data"
