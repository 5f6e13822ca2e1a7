"""Finds a value that grows steadily towards the limit of a format, from its readings at several updates.

Two curves are fitted to the second half of the readings: a straight line, and a constant factor per update (a straight
line of logarithms). The one that fits better says what the value would be after as many updates again. A curve that
does not fit, such as that of a value that jumps or levels off, says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_POINTS = 4
"""Readings that a trend needs."""
_FIT = 0.9
"""Share of the variance that the curve must explain."""
_GREW = 1.5
"""Factor by which the value must have grown in the second half."""


def find_growth(points: Sequence[tuple[int, float]], limit: float) -> str | None:
    """Return when a value would exceed a limit, in words; None if it does not grow so.

    Args:
        points: Updates, and the value in each.
        limit: The largest number of the format.
    """
    half = [(update, value) for update, value in points[len(points) // 2 :] if value > 0 and math.isfinite(value)]
    if len(points) < 2 * _POINTS - 2 or len(half) < _POINTS or half[-1][1] < _GREW * half[0][1]:
        return None
    first, last = points[0][0], half[-1][0]
    end = last + (last - first)
    fits = []
    for to, back in ((float, float), (math.log, math.exp)):
        slope, offset, explained = _fit_line([(update, to(value)) for update, value in half])
        fits.append((explained, slope, offset, to, back))
    explained, slope, offset, to, back = max(fits, key=lambda fit: fit[0])
    if (
        explained < _FIT
        or slope <= 0
        or back(min(offset + slope * end, 700.0 if back is math.exp else math.inf)) <= limit
    ):
        return None
    when = (to(limit) - offset) / slope
    return f"would exceed {limit:g} at about update {max(round(when), last + 1):,} if it keeps growing like this"


def _fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Least squares: the slope, the offset and the share of the variance that the line explains."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    square = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / square
    total = sum((y - mean_y) ** 2 for _, y in points)
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, mean_y - slope * mean_x, 1 - rest / total if total else 0.0
