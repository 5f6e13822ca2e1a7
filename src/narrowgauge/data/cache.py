"""The user's cache folder: arrays of tokens, small texts and folders that are slow to make.

A file is written under a temporary name and renamed, so it is complete or absent. Its name contains a fingerprint of
what it was made from, so it is never stale. If several processes need the same entry (the ranks of a run), one makes it
and the others wait. If the cache cannot be written, the entry is made again in the next run.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from narrowgauge import files
from narrowgauge.errors import UsageError, printable

Array = NDArray[Any]


get_folder = files.get_cache_folder


def fingerprint(files: Iterable[Path], *more: object) -> str:
    """Make a short key for files from their paths, sizes and times. Reading their content would take too long."""
    digest = hashlib.blake2b(repr(more).encode(), digest_size=12)
    for file in files:
        stat = file.stat()
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def load_or_make_array(name: str, dtype: DTypeLike, make: Callable[[], Iterator[Array]]) -> Array:
    """Return the cached array ``name``, memory-mapped. If it is missing, ``make`` yields it block by block."""
    path = get_folder() / name
    kind = np.dtype(dtype)
    if (cached := _map_if_complete(path, kind)) is not None:
        return cached
    try:
        with lock_entry(path):
            if (cached := _map_if_complete(path, kind)) is not None:
                return cached
            with _write_atomically(path) as file:
                for block in make():
                    file.write(block.astype(kind, copy=False).tobytes())
            return map_array(path, kind)
    except OSError as error:
        _report_unwritable(path, error)
    return np.concatenate([np.empty(0, kind), *make()]).astype(kind, copy=False)


def load_or_make_text(name: str, make: Callable[[], str]) -> str:
    """Return the cached text ``name``. If it is missing, ``make`` returns it."""
    path = get_folder() / name
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    text: str | None = None
    try:
        with lock_entry(path):
            with suppress(OSError):
                return path.read_text(encoding="utf-8")
            text = make()
            with _write_atomically(path) as file:
                file.write(text.encode())
    except OSError as error:
        _report_unwritable(path, error)
    return make() if text is None else text


def load_or_make_folder(name: str, make: Callable[[Path], None]) -> Path:
    """Return the cached folder ``name``. If it is missing, ``make`` fills it.

    If the cache cannot be written, a temporary folder is used until the process ends, because the content may be larger
    than the memory.
    """
    path = get_folder() / name
    if path.is_dir():
        return path
    try:
        with lock_entry(path):
            if not path.is_dir():
                _make_folder(path, make)
        return path
    except OSError as error:
        _report_unwritable(path, error)
    try:
        temporary = Path(tempfile.mkdtemp(prefix="narrowgauge-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        make(temporary)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot write below {tempfile.gettempdir()} either ({reason}); free some space") from error
    return temporary


def map_array(path: Path, dtype: DTypeLike) -> Array:
    """Map the array of a file. An empty file cannot be mapped, and gives an empty array."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def print_status(line: str) -> None:
    """Print to stderr what is being made, for a user who waits."""
    print(f"narrowgauge: {printable(line)}", file=sys.stderr, flush=True)


@contextmanager
def lock_entry(path: Path) -> Iterator[None]:
    """Hold the lock of a cache entry, so that only one process makes it. Waits for another process that holds it.

    The lock is freed when the process ends in any way. If the file system has no locks, several processes make the
    same entry, and the first to finish wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f"{path.name}.lock")
    descriptor = _acquire(lock)
    if descriptor is None:
        yield
        return
    try:
        for left in path.parent.glob(f"{path.name}.*.part"):  # left by a killed process: no other holds the lock now
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(lock: Path) -> int | None:
    """Return a descriptor that holds the lock, or None if the file system has no locks."""
    waited = False
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waited:
                    print_status(f"waiting for another process that is making {lock.with_suffix('').name}")
                waited = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The previous holder may have removed the file: then this lock is on a deleted file, and does not count.
            with suppress(FileNotFoundError):
                if os.fstat(descriptor).st_ino == lock.stat().st_ino:
                    return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                return None
            raise
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _make_folder(path: Path, make: Callable[[Path], None]) -> None:
    """Fill a folder under a temporary name, sync it to disk, and rename it."""
    part = Path(tempfile.mkdtemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent))
    try:
        make(part)
        for place in (*part.iterdir(), part):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        try:
            part.rename(path)
        except OSError:
            if not path.is_dir():  # without locks another process may have been first: its folder is as good
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _map_if_complete(path: Path, kind: np.dtype[Any]) -> Array | None:
    with suppress(OSError):
        size = path.stat().st_size
        if size > 0 and size % kind.itemsize == 0:
            return np.memmap(path, dtype=kind, mode="r")
    return None


@contextmanager
def _write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing, and rename it when it is complete and on disk."""
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _report_unwritable(path: Path, error: OSError) -> None:
    print_status(f"cannot write {path} to the cache ({error.strerror or error}); continuing without it")
