"""Output that outlives its readers: a closed pipe, a dead terminal or a full disk costs the output, never the work.

``narrowgauge train | head`` trains to its end and saves. What cannot be written is dropped, and the stream's file is
replaced by the null device, so that neither C code nor the interpreter's own last flush stumbles over it again. A full
disk is told of on the other stream; a closed pipe is not, as whoever closed it knows.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast


class Lasting:
    """A stream whose writes never fail; all else is the stream's own."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name
        self.failure: OSError | None = None
        """Why output was lost, where it was."""
        self.other: Lasting | None = None
        """Where a loss is told of."""

    def write(self, text: Any) -> int:
        if self.failure is None:
            with self._caught():
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:  # an ASCII terminal, or a name that is no text
                    encoding = getattr(self._stream, "encoding", None) or "ascii"
                    self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self.failure is None:
            with self._caught():
                self._stream.flush()

    @property
    def buffer(self) -> Any:
        """The bytes below, which last as well."""
        return Lasting(self._stream.buffer, self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _caught(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            pass  # a terminal that does not keep up: only this line is lost
        except OSError as error:
            self.failure = error
            with contextlib.suppress(OSError, ValueError, AttributeError):  # not every stream has a file
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
            if error.errno != errno.EPIPE and self.other is not None:
                reason = error.strerror or error
                self.other.write(f"narrowgauge: {self._name} cannot be written ({reason}); going on without it\n")
        except ValueError:
            if not getattr(self._stream, "closed", False):
                raise


@contextlib.contextmanager
def lasting() -> Iterator[Lasting]:
    """Standard output and error as streams that last, for the block; gives the former."""
    for number in range(3):
        # Where one was closed from the start (>&-), the next file to be opened would get its number, and every stray
        # print its content.
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        given = [stream or stack.enter_context(open(os.devnull, "w")) for stream in before]  # noqa: PTH123
        out, err = Lasting(given[0], "standard output"), Lasting(given[1], "standard error")
        out.other, err.other = err, out
        sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
        try:
            yield out
        finally:
            out.flush()
            err.flush()
            sys.stdout, sys.stderr = before
