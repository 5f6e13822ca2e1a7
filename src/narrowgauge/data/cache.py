"""What is slow to make and easy to make again: arrays of tokens and small texts, kept in the user's cache folder.

A file appears there whole or not at all (written beside its place, then renamed), and its name carries a fingerprint of
what it was made from, so that it never has to be checked for staleness. Of several processes that want the same thing
(the ranks of a run), one makes it and the others wait for it. A cache that cannot be written costs time on the next
run, never the run.
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

from narrowgauge.errors import UsageError, printable

Array = NDArray[Any]


def folder() -> Path:
    """Where the cache lies: NARROWGAUGE_CACHE, else $XDG_CACHE_HOME/narrowgauge, else ~/.cache/narrowgauge."""
    if own := os.environ.get("NARROWGAUGE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "narrowgauge"
    return Path("~/.cache/narrowgauge").expanduser()


def fingerprint(files: Iterable[Path], *more: object) -> str:
    """A short name for the content of files, from their paths, sizes and times: reading them would cost too much."""
    digest = hashlib.blake2b(repr(more).encode(), digest_size=12)
    for file in files:
        stat = file.stat()
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def keep_array(name: str, dtype: DTypeLike, make: Callable[[], Iterator[Array]]) -> Array:
    """The array kept under ``name``, memory-mapped; made block by block where it is not there yet."""
    path = folder() / name
    kind = np.dtype(dtype)
    if (kept := _kept(path, kind)) is not None:
        return kept
    try:
        with alone(path):
            if (kept := _kept(path, kind)) is not None:
                return kept
            with _whole(path) as file:
                for block in make():
                    file.write(block.astype(kind, copy=False).tobytes())
            return map_array(path, kind)
    except OSError as error:
        _complain(path, error)
    return np.concatenate([np.empty(0, kind), *make()]).astype(kind, copy=False)


def keep_text(name: str, make: Callable[[], str]) -> str:
    """The text kept under ``name``; made where it is not there yet."""
    path = folder() / name
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    text: str | None = None
    try:
        with alone(path):
            with suppress(OSError):
                return path.read_text(encoding="utf-8")
            text = make()
            with _whole(path) as file:
                file.write(text.encode())
    except OSError as error:
        _complain(path, error)
    return make() if text is None else text


def keep_folder(name: str, make: Callable[[Path], None]) -> Path:
    """The folder kept under ``name``; filled by ``make`` where it is not there yet.

    Where the cache cannot be written, a temporary folder takes its place until the process ends: what belongs here may
    be larger than the memory.
    """
    path = folder() / name
    if path.is_dir():
        return path
    try:
        with alone(path):
            if not path.is_dir():
                _fill(path, make)
        return path
    except OSError as error:
        _complain(path, error)
    try:
        temporary = Path(tempfile.mkdtemp(prefix="narrowgauge-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        make(temporary)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot write below {tempfile.gettempdir()} either ({reason}); free some space") from error
    return temporary


def map_array(path: Path, dtype: DTypeLike) -> Array:
    """The array of a file, memory-mapped; one of no bytes cannot be mapped and is simply empty."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def say(line: str) -> None:
    """Tell whoever waits what is being made."""
    print(f"narrowgauge: {printable(line)}", file=sys.stderr, flush=True)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process makes what is to lie at ``path``, and keep others waiting meanwhile.

    The lock goes with the process, however that ends. Where the file system knows no locks, several make the same
    thing and the first to finish has made it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f"{path.name}.lock")
    descriptor = _take(lock)
    if descriptor is None:
        yield
        return
    try:
        for left in path.parent.glob(f"{path.name}.*.part"):  # of a process that was killed: nobody else is at it now
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _take(lock: Path) -> int | None:
    """A descriptor that holds the lock, or None where there are no locks."""
    waited = False
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waited:
                    say(f"waiting for another process that is making {lock.with_suffix('').name}")
                waited = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The one before removed the file when it was done: a lock on it then is a lock on nothing.
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


def _fill(path: Path, make: Callable[[Path], None]) -> None:
    """Fill a folder beside its place, put it on the disk, and rename it."""
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
            if not path.is_dir():  # else another was first, where there are no locks: its work is as good
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _kept(path: Path, kind: np.dtype[Any]) -> Array | None:
    with suppress(OSError):
        size = path.stat().st_size
        if size > 0 and size % kind.itemsize == 0:
            return np.memmap(path, dtype=kind, mode="r")
    return None


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name only when it is complete and on the disk."""
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _complain(path: Path, error: OSError) -> None:
    say(f"cannot keep {path} ({error.strerror or error}); going on without it")
