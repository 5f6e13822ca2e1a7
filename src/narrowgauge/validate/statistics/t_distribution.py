"""Student's t and the chi distribution, as far as the verdict needs them; the tests hold them against SciPy.

Written out so that a validation needs nothing but Python: the t distribution by the regularised incomplete beta
function (a continued fraction, Lentz's way), the spread of a sample's standard deviation by its density.
"""

from __future__ import annotations

import math
from functools import lru_cache

_TINY = 1e-300


def t_cdf(t: float, freedom: float) -> float:
    """The probability of a value up to t."""
    tail = 0.5 * _beta(freedom / (freedom + t * t), t * t / (freedom + t * t), freedom / 2, 0.5)
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=4096)
def t_quantile(p: float, freedom: float) -> float:
    """The value that is not passed with probability p."""
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


@lru_cache(maxsize=1024)
def spread(freedom: int, points: int = 400) -> tuple[tuple[float, float], ...]:
    """Values of s / sigma, for a sample's standard deviation s, with their probabilities, which sum to 1."""
    most = 1 + 6 / math.sqrt(2 * freedom) if freedom > 8 else 4.0
    values = [(index + 0.5) * most / points for index in range(points)]
    logs = [(freedom - 1) * math.log(x) - freedom * x * x / 2 for x in values]
    top = max(logs)
    weights = [math.exp(log - top) for log in logs]
    total = sum(weights)
    return tuple((x, weight / total) for x, weight in zip(values, weights, strict=True))


def _beta(x: float, rest: float, a: float, b: float) -> float:
    """The regularised incomplete beta function at x; ``rest`` is 1 - x, which near 1 has more digits than x."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1 - front * _fraction(rest, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for step in (even, odd):
            d = 1 / _away_from_zero(1 + step * d)
            c = _away_from_zero(1 + step / c)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _away_from_zero(x: float) -> float:
    return x if abs(x) > _TINY else _TINY
