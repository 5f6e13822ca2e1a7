"""Types of numbers for argparse, with a limit on their size.

The verbs check further limits, such as at least 1 or a fraction below 1.
"""

from __future__ import annotations

import argparse

MOST = 2**31 - 1
"""Maximum of counts and sizes: torch indexes dimensions with 64 bits, but kernels and files with 32."""


def whole(text: str) -> int:
    """Parse a whole number: a count, a size, a step."""
    return _parse_whole(text, MOST)


def long(text: str) -> int:
    """Parse a whole number that may be large: a seed, a number of tokens."""
    return _parse_whole(text, 2**63 - 1)


def number(text: str) -> float:
    """Parse a floating-point number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_shorten(text)} is not a number") from None


def _parse_whole(text: str, most: int) -> int:
    try:
        value = int(text)
    except ValueError:  # also raised for more digits than Python reads
        raise argparse.ArgumentTypeError(f"{_shorten(text)} is not a whole number") from None
    if abs(value) > most:
        raise argparse.ArgumentTypeError(f"{_shorten(text)} is too large; the maximum is {most}")
    return value


def _shorten(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:30]!r}... ({len(text)} characters)"
