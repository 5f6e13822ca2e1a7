"""Streams that never fail: a closed pipe, a closed terminal or a full disk loses output, but does not stop a run.

``narrowgauge train | head`` trains to the end and saves. Output that cannot be written is dropped, and the stream's
file descriptor is replaced by the null device, so that neither C code nor the interpreter's last flush fails. A full
disk is reported on the other stream. A closed pipe is not reported.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast


class ProtectedStream:
    """Wraps a stream so that writes never fail. Everything else is the stream's own."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name
        self.failure: OSError | None = None
        """The error that lost output, if any."""
        self.other: ProtectedStream | None = None
        """The stream on which a loss is reported."""

    def write(self, text: Any) -> int:
        """Write text, or drop it after a failure."""
        if self.failure is None:
            with self._catch_errors():
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:  # an ASCII terminal, or a file name with unpaired surrogates
                    encoding = getattr(self._stream, "encoding", None) or "ascii"
                    self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write several lines."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        if self.failure is None:
            with self._catch_errors():
                self._stream.flush()

    @property
    def buffer(self) -> Any:
        """The underlying binary stream, protected as well."""
        return ProtectedStream(self._stream.buffer, self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _catch_errors(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            pass  # the terminal is too slow: only this line is lost
        except OSError as error:
            self.failure = error
            with contextlib.suppress(OSError, ValueError, AttributeError):  # not every stream has a file descriptor
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
            if error.errno != errno.EPIPE and self.other is not None:
                reason = error.strerror or error
                self.other.write(f"narrowgauge: {self._name} cannot be written ({reason}); continuing without it\n")
        except ValueError:
            if not getattr(self._stream, "closed", False):
                raise


@contextlib.contextmanager
def protect_streams() -> Iterator[ProtectedStream]:
    """Protect stdout and stderr in this context; return the protected stdout."""
    for number in range(3):
        # If a stream was closed from the start (>&-), the next opened file would get its number, and every print would
        # write into that file.
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        given = [stream or stack.enter_context(open(os.devnull, "w")) for stream in before]  # noqa: PTH123
        out, err = ProtectedStream(given[0], "standard output"), ProtectedStream(given[1], "standard error")
        out.other, err.other = err, out
        sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
        try:
            yield out
        finally:
            out.flush()
            err.flush()
            sys.stdout, sys.stderr = before
