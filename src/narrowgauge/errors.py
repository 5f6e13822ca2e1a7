"""The errors a user is meant to see: each is one line that says what was given, what was expected and what to do."""

from __future__ import annotations


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
