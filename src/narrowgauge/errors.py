"""The errors a user is meant to see: each is one line that says what was given, what was expected and what to do."""

from __future__ import annotations

import re

_HARMFUL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal would obey rather than show (all control characters but tab and newline), what turns the direction of
a text around, and halves of surrogate pairs, which no stream can encode."""


class NarrowgaugeError(Exception):
    """Base of every error that is shown to the user as one line instead of a traceback."""

    exit_code = 2
    said = False
    """Whether another process has shown the line already."""


class UsageError(NarrowgaugeError, ValueError):
    """The input is wrong: a name, a file, an option, a call out of order. Exit code 2."""


class TrainingStalled(NarrowgaugeError, RuntimeError):
    """Training cannot go on: update after update was skipped because gradients were not finite. Exit code 1."""

    exit_code = 1


def printable(text: str) -> str:
    """The text as a terminal may safely have it: every character that would be obeyed is written as ``\\x1b``.

    Samples of a model, names of files and the words of other libraries may hold anything.
    """
    return _HARMFUL.sub(lambda found: _escape(ord(found[0])), text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def one_line(error: BaseException | str, most: int = 200) -> str:
    """What an error says, in one line that a terminal may have and that is not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return printable(text if len(text) <= most else f"{text[: most - 1]}…")
