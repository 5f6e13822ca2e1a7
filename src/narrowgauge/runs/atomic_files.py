"""Puts files on the disk so that a crash leaves the old or the new one, never half; says in a line when it cannot."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from narrowgauge.errors import UsageError

_ADVICE = {
    errno.ENOSPC: "free some space, then go on with --resume",
    errno.EDQUOT: "free some of your quota, then go on with --resume",
    errno.EFBIG: "raise the file size limit (ulimit -f), then go on with --resume",
    errno.EACCES: "choose a folder you may write to with --out",
    errno.EROFS: "choose a folder you may write to with --out",
    errno.ELOOP: "it is a link, which is not followed: remove it",
}


def refuse(path: Path, error: OSError | Exception) -> UsageError:
    """The one line for a file that could not be written."""
    reason = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        # safetensors reports the system's error as text only: "... No space left on device (os error 28)".
        number = next((n for n in _ADVICE if f"os error {n})" in reason), None)
    if number is not None:
        reason = os.strerror(number)
    advice = _ADVICE.get(number or 0, "check the disk, or write elsewhere with --out")
    return UsageError(f"cannot write {path}: {reason}; {advice}; what was saved before is intact")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's errors in the block into the one line about ``path``."""
    try:
        yield
    except OSError as error:
        raise refuse(path, error) from error


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Write a whole file in place of the old one, atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.unlink(missing_ok=True)  # left by a crash, or a link that would be written through
            with temporary.open("xb") as file:
                file.write(data)
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
