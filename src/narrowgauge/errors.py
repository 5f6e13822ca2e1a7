"""The errors and warnings that users see. Each is one line: what was given, what was expected, what to do."""

from __future__ import annotations

import re

_HARMFUL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, characters that change the direction of text, and unpaired surrogates,
which no stream can encode."""


class NarrowgaugeError(Exception):
    """Base class of all errors that the command line shows as one line instead of a traceback.

    Attributes:
        exit_code: Exit code of the command line.
        already_shown: Whether another process has printed the line already.
    """

    exit_code = 2
    already_shown = False


class UsageError(NarrowgaugeError, ValueError):
    """The input is wrong: a name, a file, an option, or calls in the wrong order. Exit code 2."""


class TrainingStalled(NarrowgaugeError, RuntimeError):
    """Too many consecutive updates were skipped because gradients were not finite. Exit code 1.

    Weights and optimizer state are as before the first skipped update. The error can be caught to continue training.
    """

    exit_code = 1


class SlowRecipeWarning(UserWarning):
    """The recipe is not expected to make the model faster on this GPU. The text says why, and what to do."""


def printable(text: str) -> str:
    """Return the text with every character that could control a terminal escaped, as in ``\\x1b``.

    Model samples, file names and messages of other libraries may contain anything.

    Args:
        text: Any text.
    """
    return _HARMFUL.sub(lambda found: _escape(ord(found[0])), text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def one_line(error: BaseException | str, most: int = 200) -> str:
    """Return an error's message as one line that is safe to print.

    Args:
        error: An error or a text.
        most: Maximum length; the rest is cut off.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return printable(text if len(text) <= most else f"{text[: most - 1]}…")
