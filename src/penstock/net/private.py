"""Replace small files that hold secrets: as a whole or not at all, and never readable by others on the way."""

from __future__ import annotations

import contextlib
import os

__all__ = ["replace_private"]


def replace_private(path: str, data: bytes, mode: int = 0o600) -> None:
    """Write ``data`` under ``path`` with exactly that mode; a crash leaves the old file or the new one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_private(os.path.join(folder, "key"), b"secret")
    ...     oct(os.stat(os.path.join(folder, "key")).st_mode & 0o777)
    '0o600'
    """
    temporary = path + ".tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # a leftover may be readable by others
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            file.write(data)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
