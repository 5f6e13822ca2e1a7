"""Makes curves small: a long run is kept as some two thousand columns, each with its mean and both extremes.

A picture has no more pixels than that, and a single bad step among 100,000 still shows, as the end of its column's
band. JSON has no NaN: what is not finite becomes null, and its steps are listed beside the curve.
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


def short(value: float | None) -> float | int | None:
    """A number as the page needs it: six digits, whole ones without a point, null where it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)  # a loss scale of 2**20 stays one
    return float(f"{value:.{_DIGITS}g}")


def shorts(values: Iterable[float]) -> list[float | int | None]:
    return [short(float(value)) for value in values]


def starts(count: int, columns: int) -> NDArray[np.int64]:
    """Where each column begins: all about equally wide, one step a column where there are few."""
    columns = min(count, columns)
    return np.arange(columns, dtype=np.int64) * count // max(columns, 1)


def thin(steps: Values, values: Values, columns: int = COLUMNS, last: bool = False) -> dict[str, Any]:
    """A curve as the page has it: x, y, and lo and hi where a column stands for more than one step.

    y is the mean of a column, or with ``last`` its last value, for what changes in jumps.
    """
    begins = starts(len(steps), columns)
    if not len(begins):
        return {"x": [], "y": [], "per": 1}
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite.astype(np.int64), begins)
    ends = np.append(begins[1:], len(steps)) - 1
    curve: dict[str, Any] = {"x": shorts((steps[begins] + steps[ends]) / 2), "per": -(-len(steps) // len(begins))}
    empty = counts == 0
    if last:
        # The last finite value of each column, or what was there before it.
        index = np.maximum.accumulate(np.where(finite, np.arange(len(values)), -1))[ends]
        y = np.where(index < 0, np.nan, values[np.maximum(index, 0)])
    else:
        y = np.add.reduceat(np.where(finite, values, 0.0), begins) / np.maximum(counts, 1)
        y[empty] = np.nan
    curve["y"] = shorts(y)
    if len(begins) < len(steps):
        for name, extreme, fill in (("lo", np.minimum, np.inf), ("hi", np.maximum, -np.inf)):
            bound = extreme.reduceat(np.where(finite, values, fill), begins)
            bound[empty] = np.nan
            curve[name] = shorts(bound)
    return curve


def rug(steps: Values, marked: NDArray[np.bool_], columns: int = COLUMNS) -> list[list[float | int | None]]:
    """Where steps are marked, as [step, how many]: every one of them, or by column where there are many."""
    where = steps[marked]
    if len(where) <= columns:
        return [[short(float(step)), 1] for step in where]
    begins = starts(len(steps), columns)
    counts = np.add.reduceat(marked.astype(np.int64), begins)
    return [[short(float(steps[begin])), int(n)] for begin, n in zip(begins, counts, strict=True) if n]
