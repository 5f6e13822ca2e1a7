"""Files that a user names: read as far as they can be what is expected, written whole or not at all.

read:     never more than a limit, since /dev/zero has no end; never waits for a pipe that nobody writes to
replace:  beside its place, then renamed, with the permissions of an ordinary new file; what is there and no plain file
          (a folder, a device, a symbolic link) is never replaced

Whatever the system refuses is one line.
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
"""Bytes of a JSON file: more is none of ours."""


def kind_of(mode: int) -> str:
    """What something is that is no plain file."""
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
    """Whether there is something; a name that no file can have is one that is not there."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Whether there is a plain file (or a link to one) that can be looked at."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether there is a folder that can be looked at."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def named(text: str) -> Path:
    """The path of a name as a user types it, with ``~`` for a home."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{text!r}: there is no such home; write the whole path") from None


def whole(path: Path) -> Path:
    """The whole path, with links followed as far as they lead anywhere."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, a name too long: whoever opens it will say so
        return path.absolute()


def why_unreadable(path: Path, pipes: bool = False) -> str | None:
    """Why nothing can be read there, or None: the system's reason, or that it is no file."""
    try:
        descriptor = _open(path)
    except (OSError, ValueError) as error:
        return reason_of(error)
    try:
        mode = os.fstat(descriptor).st_mode
    finally:
        os.close(descriptor)
    fit = stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))
    return None if fit else f"it is {kind_of(mode)}, not a file"


def read(path: Path, most: int = LARGEST) -> bytes:
    """The whole of a file or pipe; refused where it is no file, cannot be read, or is longer than ``most``."""
    if why := why_unreadable(path, pipes=True):
        raise UsageError(f"cannot read {path}: {why}")
    try:
        descriptor = _open(path)
        os.set_blocking(descriptor, True)  # a pipe with a writer is waited for; without one it is empty
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason_of(error)}") from None
    if len(data) > most:
        raise UsageError(f"{path} is too large for what it should be: more than {most >> 20} MB")
    return data


def parse_json(data: bytes) -> Any:
    """What JSON says; ValueError for everything else, however deep or long."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def reason_of(error: OSError | ValueError) -> str:
    """The system's reason, in its words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def refuse_target(path: Path) -> None:
    """Refuse to write where something is that a file must not take the place of."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {reason_of(error)}; give another file") from None
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is {kind_of(mode)}: a file must not take its place; give the name of a file")


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` fill a new file, and put it in the place of ``path``; OSError goes on to the caller.

    It has the permissions of the file it replaces, else those of an ordinary new file of the user's.
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
    """Write a result where an option says. A device or pipe (``/dev/stdout``) is written to, a file replaced."""
    data = text.encode("utf-8", "backslashreplace")

    def write(new: Path) -> None:
        new.write_bytes(data)

    try:
        if _is_stream(path):
            _pour(path, data)
        else:
            replace(path.resolve() if path.is_symlink() else path, write)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{option}: cannot write {path}: {reason_of(error)}; give another file") from None


def refuse_unwritable(path: Path, option: str) -> None:
    """Refuse early what could not be written at the end of a long measurement."""
    try:
        if _is_stream(path):
            return
        target = path.resolve() if path.is_symlink() else path
        refuse_target(target)
        folder = next(parent for parent in target.absolute().parents if parent.exists())
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{option}: cannot write {path}: {reason_of(error)}; give another file") from None
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option}: cannot write {path}: {folder} is no folder to write to; give another file")


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _is_stream(path: Path) -> bool:
    """Whether bytes go to something that has no name of its own: a device, a pipe, what stdout is."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        return path.is_relative_to("/dev") or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    return False


def _pour(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe that nobody reads is refused
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _mode_for(path: Path) -> int:
    with contextlib.suppress(OSError):
        return stat.S_IMODE(path.stat().st_mode)
    # The umask can only be read by setting it, which other threads would notice: a file made with it tells it as well.
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
