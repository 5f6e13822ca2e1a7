"""Reads and writes sizes of memory as people write them: 80GB, 75 GiB, or 0.9 of what a device has."""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

from narrowgauge.errors import UsageError

UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
LEAST_FLOAT_BYTES = 1000
"""A number with a decimal point that is above this is one of bytes, such as ``0.9 * total``; 1.5 would be a share."""
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?I?B)", re.IGNORECASE)
_SHARE = re.compile(r"[01](?:\.\d{1,6})?|\.\d{1,6}")


def parse_size(text: str) -> int | None:
    """Return the bytes of a size such as 5GB, 1.5 TB or 2GiB; None for any other text, and for nothing."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    return size if size >= 1 else None


def parse_budget(budget: str | float, total_bytes: int | None, option: str = "memory_budget") -> int:
    """Return the bytes of a memory budget.

    Args:
        budget: A size (``"80GB"``, ``"75 GiB"``), a share of the device's memory (``"0.9"``), or a number of bytes.
        total_bytes: The device's memory; None if it is not known.
        option: The name of the option, for errors.

    Raises:
        UsageError: It is neither a size nor a share, or the share of a device whose memory is not known.
    """
    number = _read_number(budget)
    if number is not None:
        return number
    text = str(budget).strip()
    size = parse_size(text)
    if size is not None:
        return size
    share = float(text) if _SHARE.fullmatch(text) else 0.0
    if not 0 < share <= 1 or isinstance(budget, bool):
        raise UsageError(
            f"{option} {text[:40]!r} is not a size; give one such as 80GB or 75GiB, or a share of the GPU's memory "
            "such as 0.9"
        )
    if total_bytes is None:
        raise UsageError(f"{option} {text}: this device does not report its memory; give a size such as 80GB")
    return int(share * total_bytes)


def _read_number(budget: Any) -> int | None:
    """Return the bytes of a budget that is a number of bytes, also one of NumPy's; None for a share and for text."""
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        return None
    least = 1 if isinstance(budget, numbers.Integral) else LEAST_FLOAT_BYTES
    size = float(budget)
    return int(size) if least < size < math.inf else None


def format_size(size_bytes: float) -> str:
    """Return a size in units of 1000, as in 59.7 GB."""
    for unit in ("TB", "GB", "MB", "KB"):
        if size_bytes >= UNITS[unit]:
            return f"{size_bytes / UNITS[unit]:.1f} {unit}"
    return f"{size_bytes:.0f} bytes"
