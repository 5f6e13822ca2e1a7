"""What is slow to make and easy to make again: arrays of tokens and small texts, kept in the user's cache folder.

A file appears there whole or not at all (written beside its place, then renamed), and its name carries a fingerprint of
what it was made from, so that it never has to be checked for staleness. A cache that cannot be written costs time on
the next run, never the run.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

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
    with suppress(OSError):
        if path.stat().st_size % kind.itemsize == 0 and path.stat().st_size > 0:
            return np.memmap(path, dtype=kind, mode="r")
    try:
        with _whole(path) as file:
            for block in make():
                file.write(block.astype(kind, copy=False).tobytes())
        return np.memmap(path, dtype=kind, mode="r") if path.stat().st_size else np.empty(0, kind)
    except OSError as error:
        _complain(path, error)
    return np.concatenate([np.empty(0, kind), *make()]).astype(kind, copy=False)


def keep_text(name: str, make: Callable[[], str]) -> str:
    """The text kept under ``name``; made where it is not there yet."""
    path = folder() / name
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    text = make()
    try:
        with _whole(path) as file:
            file.write(text.encode())
    except OSError as error:
        _complain(path, error)
    return text


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name only when it is complete and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
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
    reason = error.strerror or error
    print(f"narrowgauge: cannot keep {path} ({reason}); going on without it", file=sys.stderr, flush=True)
