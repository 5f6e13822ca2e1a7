"""Keeps a run folder to one process: a second is refused, and the kernel frees the lock however the first ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from narrowgauge.errors import UsageError
from narrowgauge.runs.atomic_files import refuse


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder, which is made if need be."""
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _not_ours(path) from error
        raise refuse(folder, error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _not_ours(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise UsageError(
                f"run folder {folder} is in use by process {holder}; wait for it, stop it, or take another --out"
            ) from None
        except OSError as error:
            raise UsageError(f"run folder {folder} cannot be locked ({error.strerror}); take a local --out") from error
        # The number is for the message above alone. The file stays: removing it would let a third process lock a new
        # file of the same name while a second one waits on the old.
        if status.st_nlink == 1:  # else it is also another file, which would lose its content
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _not_ours(path: Path) -> UsageError:
    return UsageError(f"{path} is a link or a device, not a lock of narrowgauge; remove it, or take another --out")
