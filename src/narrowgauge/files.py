"""Reads and writes files that a user names. Every error of the system becomes one line.

read:     at most a given size, since /dev/zero never ends; does not wait for a pipe without a writer
replace:  writes a temporary file and renames it, with the permissions of an ordinary new file; never replaces what is
          not a regular file (a folder, a device, a symbolic link)
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from narrowgauge.errors import UsageError

LARGEST = 64 << 20
"""Maximum size of a JSON file in bytes. narrowgauge writes no larger ones."""


def describe_type(mode: int) -> str:
    """Name the type of something that is not a regular file."""
    for is_one, name in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if is_one(mode):
            return name
    return "a device"


def exists(path: Path) -> bool:
    """Whether a path exists. False for a name that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Whether a path is a regular file, or a link to one, that the user may access."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether a path is a folder that the user may access."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def get_cache_folder() -> Path:
    """Return the cache folder: NARROWGAUGE_CACHE, else $XDG_CACHE_HOME/narrowgauge, else ~/.cache/narrowgauge."""
    if own := os.environ.get("NARROWGAUGE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "narrowgauge"
    return Path("~/.cache/narrowgauge").expanduser()


def expand_path(text: str) -> Path:
    """Make a path from what a user typed, with ``~`` expanded."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{text!r}: there is no such home folder; write the full path") from None


def resolve_path(path: Path) -> Path:
    """Make a path absolute and follow its links."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # circular links, a name too long: opening the path will report it
        return path.absolute()


def explain_unreadable(path: Path, pipes: bool = False) -> str | None:
    """Explain why a path cannot be read as a file: the system's reason, or its type. None: it can be read.

    Args:
        path: The path.
        pipes: Whether a pipe is acceptable too.
    """
    try:
        descriptor = _open(path)
    except (OSError, ValueError) as error:
        return get_reason(error)
    try:
        mode = os.fstat(descriptor).st_mode
    finally:
        os.close(descriptor)
    fit = stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))
    return None if fit else f"it is {describe_type(mode)}, not a file"


def read(path: Path, most: int = LARGEST) -> bytes:
    """Read a whole file or pipe.

    Args:
        path: The path.
        most: Maximum size in bytes.

    Raises:
        UsageError: It is not a file, cannot be read, or is larger.
    """
    if why := explain_unreadable(path, pipes=True):
        raise UsageError(f"cannot read {path}: {why}")
    try:
        descriptor = _open(path)
        os.set_blocking(descriptor, True)  # waits for the writer of a pipe; a pipe without one is empty
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {get_reason(error)}") from None
    if len(data) > most:
        raise UsageError(f"{path} is too large: expected at most {most >> 20} MB")
    return data


def parse_json(data: bytes) -> Any:
    """Parse JSON. Raises ValueError for anything else, including JSON that is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def get_reason(error: OSError | ValueError) -> str:
    """Return the system's text for an error."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def refuse_target(path: Path) -> None:
    """Refuse to replace what is not a regular file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {get_reason(error)}; give another file") from None
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is {describe_type(mode)} and is not replaced; give the name of a file")


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """Replace a file atomically. The new file has the permissions of the old one, or of an ordinary new file.

    Args:
        path: The file to replace or create.
        write: Fills a temporary file.

    Raises:
        UsageError: ``path`` is not a regular file.
        OSError: The file cannot be written.
    """
    refuse_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".tmp", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(_mode_for(path))
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def save_text(path: Path, text: str, option: str) -> None:
    """Write a result to the file that an option names. A device or pipe (``/dev/stdout``) is written, not replaced."""
    data = text.encode("utf-8", "backslashreplace")

    def write(new: Path) -> None:
        new.write_bytes(data)

    try:
        if _is_stream(path):
            _write_stream(path, data)
        else:
            replace(path.resolve() if path.is_symlink() else path, write)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{option}: cannot write {path}: {get_reason(error)}; give another file") from None


def refuse_unwritable(path: Path, option: str) -> None:
    """Refuse a path that could not be written at the end of a long measurement, before it starts."""
    try:
        if _is_stream(path):
            return
        target = path.resolve() if path.is_symlink() else path
        refuse_target(target)
        folder = next(parent for parent in target.absolute().parents if parent.exists())
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{option}: cannot write {path}: {get_reason(error)}; give another file") from None
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option}: cannot write {path}: {folder} is not a writable folder; give another file")


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _is_stream(path: Path) -> bool:
    """Whether a path is a device, a pipe or whatever stdout is, rather than a file."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        return path.is_relative_to("/dev") or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    return False


def _write_stream(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # fails for a pipe without a reader
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _mode_for(path: Path) -> int:
    with contextlib.suppress(OSError):
        return stat.S_IMODE(path.stat().st_mode)
    # Reading the umask means setting it, which would affect other threads. A new file shows it as well.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".umask-") as folder:
        probe = Path(folder) / "probe"
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY, 0o666))
        return stat.S_IMODE(probe.stat().st_mode)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
