"""The suite every disk passes: what Disk and File promise, whatever they are made of.

A disk's test module subclasses DiskConformance and says how to make one:

    class TestMyDisk(DiskConformance):
        def make(self, folder): return MyDisk(), "a folder that exists on it"

The methods are pytest tests; each is named after the promise it holds.
"""

from __future__ import annotations

import errno
import threading
from io import UnsupportedOperation
from pathlib import Path

import pytest

from penstock.disk import Disk
from penstock.disk.atomic import save_atomically
from penstock.errors import LockedError

__all__ = ["DiskConformance"]


class DiskConformance:
    """Subclass it for a disk; see the head of this module."""

    def make(self, folder: Path) -> tuple[Disk, str]:
        """Return a disk and the name of an empty folder on it."""
        raise NotImplementedError

    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        with disk.create(f"{root}/a") as file:
            file.write_at(0, b"hello")
            file.write_at(3, memoryview(b"p!?"))
            assert file.read_at(0, 100) == b"help!?"
            assert file.read_at(2, 2) == b"lp"
            assert file.read_at(6, 10) == b""
            assert file.read_at(100, 10) == b""
        with disk.open(f"{root}/a") as file:
            assert file.read_at(0, 6) == b"help!?"
            target = bytearray(4)
            assert file.read_into(1, memoryview(target)) == 4
            assert bytes(target) == b"elp!"
            assert file.read_into(4, memoryview(target)) == 2

    def test_a_write_past_the_end_leaves_zeros_between(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        with disk.create(f"{root}/a") as file:
            file.write_at(5, b"x")
            assert file.read_at(0, 10) == b"\0\0\0\0\0x"

    def test_many_chunks_are_written_in_a_row(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        chunks = [b"%d," % n for n in range(3000)]  # more than one call takes
        with disk.create(f"{root}/a") as file:
            file.write_many_at(2, [*chunks, memoryview(b"end")])
            file.write_many_at(0, [])
            expected = b"\0\0" + b"".join(chunks) + b"end"
            assert file.read_at(0, len(expected) + 10) == expected

    def test_truncate_cuts_and_extends(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        with disk.create(f"{root}/a") as file:
            file.write_at(0, b"hello")
            file.truncate(2)
            assert file.stat().size == 2
            file.truncate(4)
            assert file.read_at(0, 10) == b"he\0\0"

    def test_allocate_extends_with_zeros_and_keeps_what_is_there(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        with disk.create(f"{root}/a") as file:
            file.write_at(0, b"hello")
            file.allocate(0, 8192)
            assert file.stat().size == 8192
            assert file.read_at(0, 6) == b"hello\0"
            file.allocate(0, 10)
            assert file.stat().size == 8192

    def test_a_mapping_and_the_file_are_the_same_bytes(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        with disk.create(f"{root}/a") as file:
            file.truncate(8192)
            window = file.map(4096, 4096, writable=True)
            memoryview(window)[:5] = b"hello"
            assert file.read_at(4096, 5) == b"hello"
            with disk.open(f"{root}/a") as other:
                seen = other.map(0, 8192)
                file.write_at(0, b"there")
                assert bytes(memoryview(seen)[:5]) == b"there"
                assert bytes(memoryview(seen)[4096:4101]) == b"hello"
                assert memoryview(seen).readonly

    def test_a_mapping_outlives_its_file(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        with disk.create(f"{root}/a") as file:
            file.write_at(0, b"hello".ljust(4096, b"\0"))
            window = file.map(0, 4096)
        disk.remove(f"{root}/a")
        assert bytes(memoryview(window)[:5]) == b"hello"

    def test_an_open_file_outlives_its_name(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        disk.create(f"{root}/a").write_at(0, b"old")
        with disk.open(f"{root}/a") as file:
            identity = file.stat().identity
            disk.remove(f"{root}/a")
            disk.create(f"{root}/a").write_at(0, b"new")
            assert file.read_at(0, 3) == b"old"
            found = disk.stat(f"{root}/a")
            assert found is not None
            assert found.identity != identity

    def test_a_renamed_file_keeps_its_identity(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        disk.create(f"{root}/a").write_at(0, b"one")
        disk.create(f"{root}/b").write_at(0, b"two")
        before = disk.stat(f"{root}/a")
        disk.rename(f"{root}/a", f"{root}/b")
        after = disk.stat(f"{root}/b")
        assert before is not None
        assert after is not None
        assert before.identity == after.identity
        assert disk.list(root) == ["b"]
        assert disk.open(f"{root}/b").read_at(0, 3) == b"one"

    def test_a_link_is_a_second_name_and_replaces_nothing(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        disk.create(f"{root}/a").write_at(0, b"one")
        disk.link(f"{root}/a", f"{root}/b")
        disk.modify(f"{root}/b").write_at(0, b"two")
        assert disk.open(f"{root}/a").read_at(0, 3) == b"two"
        with pytest.raises(FileExistsError):
            disk.link(f"{root}/a", f"{root}/b")
        disk.remove(f"{root}/a")
        assert disk.open(f"{root}/b").read_at(0, 3) == b"two"

    def test_create_refuses_a_name_that_is_taken(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        disk.create(f"{root}/a").write_at(0, b"kept")
        with pytest.raises(FileExistsError):
            disk.create(f"{root}/a")
        assert disk.open(f"{root}/a").read_at(0, 4) == b"kept"

    def test_what_is_not_there_is_named_in_the_error(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        missing = f"{root}/none"
        for call in (disk.open, disk.modify, disk.remove, lambda path: disk.rename(path, f"{root}/b")):
            with pytest.raises(FileNotFoundError) as caught:
                call(missing)
            assert caught.value.filename == missing
        assert disk.stat(missing) is None
        assert disk.stat(f"{missing}/deeper") is None
        with pytest.raises(FileNotFoundError):
            disk.list(missing)
        with pytest.raises(FileNotFoundError):
            disk.create(f"{missing}/a")

    def test_folders_are_made_listed_and_removed(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        disk.make_folder(f"{root}/sub")
        disk.make_folder(f"{root}/sub")
        disk.create(f"{root}/sub/b").close()
        disk.create(f"{root}/sub/a").close()
        assert disk.list(f"{root}/sub") == ["a", "b"]
        assert disk.list(root) == ["sub"]
        found = disk.stat(f"{root}/sub")
        assert found is not None
        assert found.is_folder
        with pytest.raises(OSError) as caught:  # noqa: PT011
            disk.remove_folder(f"{root}/sub")
        assert caught.value.errno == errno.ENOTEMPTY
        disk.remove(f"{root}/sub/a")
        disk.remove(f"{root}/sub/b")
        disk.remove_folder(f"{root}/sub")
        assert disk.list(root) == []

    def test_sync_is_accepted_everywhere(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        with disk.create(f"{root}/a") as file:
            file.write_at(0, b"x")
            file.sync()
        disk.sync_folder(root)
        assert disk.open(f"{root}/a").read_at(0, 1) == b"x"

    def test_a_closed_file_is_not_used_again(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        file = disk.create(f"{root}/a")
        file.close()
        file.close()
        with pytest.raises(OSError) as caught:  # noqa: PT011
            file.write_at(0, b"x")
        assert caught.value.errno == errno.EBADF

    def test_a_lock_has_one_owner(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        lock = disk.lock(f"{root}/lock")
        with pytest.raises(LockedError, match="lock"):
            disk.lock(f"{root}/lock")
        lock.release()
        lock.release()
        again = disk.lock(f"{root}/lock")
        lock.release()  # an old owner cannot free the new one's lock
        with pytest.raises(LockedError):
            disk.lock(f"{root}/lock")
        again.release()

    def test_a_latch_is_the_lock_taken_many_times(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        one, two = disk.latch(f"{root}/lock"), disk.latch(f"{root}/lock")
        two.release()  # nobody has it
        for _ in range(3):
            assert one.take()
            assert not two.take()
            two.release()  # who has it not cannot free it
            with pytest.raises(LockedError):
                disk.lock(f"{root}/lock")
            one.release()
            held = disk.lock(f"{root}/lock")
            assert not one.take()
            held.release()
        assert two.take()
        two.close()
        assert one.take()
        one.close()
        one.close()

    def test_a_latch_needs_its_folder(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        with pytest.raises(FileNotFoundError):
            disk.latch(f"{root}/absent/lock").take()

    def test_the_boot_id_stays_the_same(self, tmp_path: Path) -> None:
        disk, _ = self.make(tmp_path)
        assert len(disk.boot_id()) == 16
        assert disk.boot_id() == disk.boot_id()

    def test_threads_read_and_write_one_file(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        file = disk.create(f"{root}/a")
        file.truncate(8 * 1000)

        def work(number: int) -> None:
            for turn in range(100):
                file.write_at(number * 1000 + turn * 10, b"%d" % number * 10)
                assert file.read_at(number * 1000 + turn * 10, 10) == b"%d" % number * 10

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert file.read_at(0, 8000) == b"".join(b"%d" % n * 1000 for n in range(8))

    def test_an_atomic_save_replaces_the_whole_file(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        save_atomically(disk, f"{root}/a", b"a long first version")
        save_atomically(disk, f"{root}/a", b"short")
        assert disk.list(root) == ["a"]
        assert disk.open(f"{root}/a").read_at(0, 100) == b"short"

    def test_two_files_exchange_their_names_or_stay_as_they_are(self, tmp_path: Path) -> None:
        disk, root = self.make(tmp_path)
        for name in "ab":
            with disk.create(f"{root}/{name}") as file:
                file.write_at(0, name.encode())
        with pytest.raises(FileNotFoundError):
            disk.exchange(f"{root}/a", f"{root}/missing")
        try:
            disk.exchange(f"{root}/a", f"{root}/b")
            expected = [b"b", b"a"]
        except UnsupportedOperation:
            expected = [b"a", b"b"]
        assert disk.list(root) == ["a", "b"]
        assert [disk.open(f"{root}/{name}").read_at(0, 9) for name in "ab"] == expected
