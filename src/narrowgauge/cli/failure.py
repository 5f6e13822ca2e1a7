"""What a verb that failed says, and its exit code.

    an error of ours           its one line                              its own: 2, or 1 (stalled)
    the system refuses a file  one line: which file, and why             2
    a file nests too deeply    one line                                  2
    memory ends                one line                                  2
    the user's code raises     the traceback, from that code on          3
    anything else              the whole traceback                       3

Code 1 is a finding: a program that breaks must not look like a training that was judged.
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
"""Exit code where the user's code, or ours, raised what nobody expected."""
_SMALLER = "give a smaller --batch or --context (narrowgauge memory says what fits)"
_LIBRARIES = frozenset({"site-packages", "dist-packages"})
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "unable to allocate")


def tell(error: BaseException) -> int:
    """Say on stderr what went wrong; gives the exit code."""
    if isinstance(error, NarrowgaugeError):
        if not error.said:
            _line(one_line(error, 2000))
        return error.exit_code
    theirs = first_frame_of_user(error.__traceback__)
    if theirs is None and _is_out_of_memory(error):
        _line(f"memory ran out: {one_line(error, 300)}; {_SMALLER}")
        return 2
    if theirs is None and isinstance(error, RecursionError):
        _line("what was given is nested too deeply to be read; give another file")
        return 2
    if theirs is None and isinstance(error, OSError) and error.filename is not None:
        _line(one_line(f"{error.filename}: {error.strerror or error}; give another file or folder", 2000))
        return 2
    shown = traceback.format_exception(type(error), error, theirs or error.__traceback__)
    print(printable("".join(shown)), end="", file=sys.stderr)
    if theirs is None:
        _line(f"{type(error).__name__} was not expected; unless your task made it, report it with the lines above")
    else:
        advice = f"; {_SMALLER}" if _is_out_of_memory(error) else ""
        _line(f"your code raised {type(error).__name__}: {one_line(error, 300)} (the lines above say where){advice}")
    return RAISED


def first_frame_of_user(trace: TracebackType | None) -> TracebackType | None:
    """The first frame of a traceback that is neither ours nor of an installed library; None where there is none."""
    while trace is not None:
        if not _is_installed(trace.tb_frame.f_code.co_filename):
            return trace
        trace = trace.tb_next
    return None


def _is_installed(filename: str) -> bool:
    if filename.startswith("<"):
        return True
    path = Path(filename)
    return not _LIBRARIES.isdisjoint(path.parts) or any(path.is_relative_to(home) for home in _homes())


@functools.cache
def _homes() -> tuple[Path, ...]:
    return (Path(narrowgauge.__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")))


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)


def _line(text: str) -> None:
    print(f"narrowgauge: {text}", file=sys.stderr)
