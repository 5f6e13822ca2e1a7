"""Reports the error that ended a verb, and returns the exit code.

    a narrowgauge error          its one line                                  2, or 1 for TrainingStalled
    a file cannot be accessed    one line with the file and the reason         2
    a file nests too deeply      one line                                      2
    out of memory                one line                                      2
    the user's code raises       the traceback, starting with that code        3
    anything else                the complete traceback                        3

Exit code 1 means a finding, so a crash must never return it.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import narrowgauge
from narrowgauge.errors import NarrowgaugeError, one_line, printable

RAISED = 3
"""Exit code after an unexpected error in the user's code or in narrowgauge."""
_SMALLER = "use a smaller --batch or --context (narrowgauge memory shows what fits)"
_LIBRARIES = frozenset({"site-packages", "dist-packages"})
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "unable to allocate")


def report(error: BaseException) -> int:
    """Print an error on stderr and return the exit code."""
    if isinstance(error, NarrowgaugeError):
        if not error.already_shown:
            _print_line(one_line(error, 2000))
        return error.exit_code
    user_frame = find_user_frame(error.__traceback__)
    if user_frame is None and _is_out_of_memory(error):
        _print_line(f"out of memory: {one_line(error, 300)}; {_SMALLER}")
        return 2
    if user_frame is None and isinstance(error, RecursionError):
        _print_line("the input is nested too deeply to be read; give another file")
        return 2
    if user_frame is None and isinstance(error, OSError) and error.filename is not None:
        _print_line(one_line(f"{error.filename}: {error.strerror or error}; give another file or folder", 2000))
        return 2
    shown = traceback.format_exception(type(error), error, user_frame or error.__traceback__)
    print(printable("".join(shown)), end="", file=sys.stderr)
    if user_frame is None:
        _print_line(
            f"{type(error).__name__} was unexpected; unless your task raised it, please report it with the lines above"
        )
    else:
        advice = f"; {_SMALLER}" if _is_out_of_memory(error) else ""
        _print_line(
            f"your code raised {type(error).__name__}: {one_line(error, 300)} (see the traceback above){advice}"
        )
    return RAISED


def find_user_frame(trace: TracebackType | None) -> TracebackType | None:
    """Return the first frame of a traceback outside of narrowgauge and installed libraries, or None."""
    while trace is not None:
        if not _is_installed(trace.tb_frame.f_code.co_filename):
            return trace
        trace = trace.tb_next
    return None


def _is_installed(filename: str) -> bool:
    if filename.startswith("<"):
        return True
    path = Path(filename)
    return not _LIBRARIES.isdisjoint(path.parts) or any(path.is_relative_to(folder) for folder in _library_folders())


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    return (Path(narrowgauge.__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")))


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)


def _print_line(text: str) -> None:
    print(f"narrowgauge: {text}", file=sys.stderr)
