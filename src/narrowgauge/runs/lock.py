"""Locks a run folder for one process. A second process is refused. The kernel frees the lock when the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from narrowgauge.errors import UsageError
from narrowgauge.runs.atomic_files import explain_error


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder, and create the folder if it is missing."""
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _refuse_lock_file(path) from error
        raise explain_error(folder, error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refuse_lock_file(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise UsageError(
                f"run folder {folder} is in use by process {holder}; wait for it, stop it, or choose another --out"
            ) from None
        except OSError as error:
            reason = error.strerror
            raise UsageError(f"run folder {folder} cannot be locked ({reason}); choose a local --out") from error
        # The process id is only for the message above. The file stays: if it were removed, a third process could lock
        # a new file of the same name while a second one waits on the old.
        if status.st_nlink == 1:  # a hard link to another file, whose content would be lost, is not written
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _refuse_lock_file(path: Path) -> UsageError:
    return UsageError(f"{path} is a link or a device, not a lock of narrowgauge; remove it, or choose another --out")
