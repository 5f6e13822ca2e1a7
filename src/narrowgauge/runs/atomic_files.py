"""Writes files and folders atomically: a crash leaves the old state or the new one. A failed write is one line."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from narrowgauge import files
from narrowgauge.errors import UsageError

RESUME = "continue with --resume"
"""What ``train`` advises when the cause of a failed run is removed. Other verbs have no ``--resume``."""
_ADVICE = {
    errno.ENOSPC: "free some space, then {again}",
    errno.EDQUOT: "free some of your quota, then {again}",
    errno.EFBIG: "raise the file size limit (ulimit -f), then {again}",
    errno.EACCES: "choose a folder you may write to with --out",
    errno.EROFS: "choose a folder you may write to with --out",
    errno.ELOOP: "it is a link, which is not followed: remove it",
}


def explain_error(path: Path, error: OSError | Exception, again: str = RESUME) -> UsageError:
    """Make the one-line error for a file that could not be written, with advice.

    Args:
        path: The file.
        error: Why it could not be written.
        again: What to do when the cause is removed.
    """
    reason = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        # safetensors reports the system's error as text only: "... No space left on device (os error 28)".
        number = next((n for n in _ADVICE if f"os error {n})" in reason), None)
    if number is not None:
        reason = os.strerror(number)
    advice = _ADVICE.get(number or 0, "check the disk, or write elsewhere with --out").format(again=again)
    return UsageError(f"cannot write {path}: {reason}; {advice}; what was saved before is intact")


@contextlib.contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into the one-line error about ``path``."""
    try:
        yield
    except OSError as error:
        raise explain_error(path, error) from error


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the entries of a folder, are on disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Replace the content of a file atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    with explain_errors(path):
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


@contextlib.contextmanager
def create_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden folder next to ``path``, and rename it to ``path`` when the block has filled it.

    Raises:
        UsageError: ``path`` exists and is not an empty folder, or cannot be written.
    """
    refuse_filled_folder(path)
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                sync(Path(folder) / name)
            sync(Path(folder))
        refuse_filled_folder(path)
        temporary.rename(path)
        sync(path.parent)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {files.get_reason(error)}; nothing was left there") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_filled_folder(path: Path) -> None:
    """Refuse a folder to create that exists with something in it, or is something else."""
    try:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise UsageError(f"{path} exists and is not a folder; give the name of a new one with --out")
        if path.is_dir() and any(path.iterdir()):
            raise UsageError(f"{path} is not empty, and is not replaced; give the name of a new folder with --out")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {files.get_reason(error)}; give another folder with --out") from None
