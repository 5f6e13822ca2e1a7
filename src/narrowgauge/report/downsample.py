"""Downsamples curves: a long run is reduced to about 2,000 columns, each with its mean, minimum and maximum.

A chart has no more pixels than that, and a single bad step among 100,000 is still visible as the edge of its column's
band. JSON has no NaN: values that are not finite become null, and their steps are listed separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = 2000
_DIGITS = 6

Values = NDArray[np.float64]


def round_number(value: float | None) -> float | int | None:
    """Rounds to six digits for the page data; whole numbers become int, and what is not finite becomes None."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)  # keeps a loss scale of 2**20 exact
    return float(f"{value:.{_DIGITS}g}")


def round_numbers(values: Iterable[float]) -> list[float | int | None]:
    return [round_number(float(value)) for value in values]


def find_bin_starts(count: int, columns: int) -> NDArray[np.int64]:
    """The index at which each column begins. Columns are about equally wide; if there are few steps, one step each."""
    columns = min(count, columns)
    return np.arange(columns, dtype=np.int64) * count // max(columns, 1)


def downsample(steps: Values, values: Values, columns: int = COLUMNS, last: bool = False) -> dict[str, Any]:
    """Reduces a curve to at most ``columns`` points.

    Args:
        steps: The x values.
        values: The y values; they may contain NaN and infinity.
        columns: The number of points, at most.
        last: Take the last value of a column instead of its mean, for values that change in jumps.

    Returns:
        ``x``, ``y`` and ``per`` (steps in a column), and ``lo`` and ``hi`` if a column has more than one step.
    """
    begins = find_bin_starts(len(steps), columns)
    if not len(begins):
        return {"x": [], "y": [], "per": 1}
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite.astype(np.int64), begins)
    ends = np.append(begins[1:], len(steps)) - 1
    curve: dict[str, Any] = {
        "x": round_numbers((steps[begins] + steps[ends]) / 2),
        "per": -(-len(steps) // len(begins)),
    }
    empty = counts == 0
    if last:
        # The last finite value of each column, or the last one before it.
        index = np.maximum.accumulate(np.where(finite, np.arange(len(values)), -1))[ends]
        y = np.where(index < 0, np.nan, values[np.maximum(index, 0)])
    else:
        y = np.add.reduceat(np.where(finite, values, 0.0), begins) / np.maximum(counts, 1)
        y[empty] = np.nan
    curve["y"] = round_numbers(y)
    if len(begins) < len(steps):
        for name, extreme, fill in (("lo", np.minimum, np.inf), ("hi", np.maximum, -np.inf)):
            bound = extreme.reduceat(np.where(finite, values, fill), begins)
            bound[empty] = np.nan
            curve[name] = round_numbers(bound)
    return curve


def bin_marks(steps: Values, marked: NDArray[np.bool_], columns: int = COLUMNS) -> list[list[float | int | None]]:
    """The marked steps as [step, count]: one entry per step, or one per column if there are many."""
    where = steps[marked]
    if len(where) <= columns:
        return [[round_number(float(step)), 1] for step in where]
    begins = find_bin_starts(len(steps), columns)
    counts = np.add.reduceat(marked.astype(np.int64), begins)
    return [[round_number(float(steps[begin])), int(n)] for begin, n in zip(begins, counts, strict=True) if n]
