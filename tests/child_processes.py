"""Starts a child process that cannot outlive its test. Signals are at their defaults: see tests/conftest.py."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

LIMIT_S = 30
"""How long the kernel may take to end a process that was killed."""


@contextlib.contextmanager
def start(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Like ``with subprocess.Popen(...)``, but the end of the block kills the child instead of waiting for it.

    ``Popen.__exit__`` waits without a limit, also after a failed assertion, and so a child that does not end would
    hang the whole suite.
    """
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # data left in the buffer of a closed pipe
                    stream.close()
