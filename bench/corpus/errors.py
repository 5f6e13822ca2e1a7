"""Errors of the commands: one line on stderr and an exit code, and unfinished files are removed."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable


class Failed(Exception):
    """Bad input, or a step that could not be done. The user sees the message as one line."""


class Dropped(Exception):
    """A file or document is left out. The message is the reason, which is counted."""


def run_command(name: str, work: Callable[[], int]) -> int:
    """Run a command and report its errors in one line.

    Returns:
        The exit code: that of ``work``, 2 for bad input, 1 for a full disk, 130 for an interrupt.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes unfinished files, as Ctrl-C does
    try:
        return work()
    except Failed as error:
        message, code = str(error), 2
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        message, code = ("the disk is full; free some space", 1) if is_full else (str(error), 2)
    except KeyboardInterrupt:
        message, code = "interrupted; unfinished files were removed", 130
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"{name}: {message}", file=sys.stderr)
    return code
