"""Numbers on the command line: what argparse reads as one, within what the machine can count.

What a number must be beyond that (at least 1, a share below 1) is said by whoever uses it.
"""

from __future__ import annotations

import argparse

MOST = 2**31 - 1
"""Of counts and sizes: torch indexes a dimension with 64 bits, but kernels and files count in 32."""


def whole(text: str) -> int:
    """A whole number of ordinary size: a count, a size, a step."""
    return _whole(text, MOST)


def long(text: str) -> int:
    """A whole number that may be large: a seed, a number of tokens."""
    return _whole(text, 2**63 - 1)


def number(text: str) -> float:
    """Any number that a float can be."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_short(text)} is no number") from None


def _whole(text: str, most: int) -> int:
    try:
        value = int(text)
    except ValueError:  # also of more digits than Python reads
        raise argparse.ArgumentTypeError(f"{_short(text)} is no whole number") from None
    if abs(value) > most:
        raise argparse.ArgumentTypeError(f"{_short(text)} is too large; the most is {most}")
    return value


def _short(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:30]!r}... ({len(text)} characters)"
