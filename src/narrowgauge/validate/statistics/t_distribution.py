"""Student's t and the chi distribution, as far as the verdict needs them; the tests compare them with SciPy.

Implemented here so that a validation does not need SciPy: the t distribution by the regularized incomplete beta
function (a continued fraction, Lentz's algorithm), the distribution of a sample's standard deviation by its density.
"""

from __future__ import annotations

import math
from functools import lru_cache

_TINY = 1e-300
_ROOT_2 = math.sqrt(2)


def t_cdf(t: float, df: float) -> float:
    """The cumulative distribution function of Student's t."""
    tail = 0.5 * _beta(df / (df + t * t), t * t / (df + t * t), df / 2, 0.5)
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=4096)
def t_quantile(p: float, df: float) -> float:
    """The inverse of ``t_cdf``."""
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):  # no number is between them
            break
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / _ROOT_2)


@lru_cache(maxsize=1024)
def tabulate_deviation(df: int, points: int = 400) -> tuple[tuple[float, float], ...]:
    """The distribution of s / sigma, for a sample's standard deviation s: values with probabilities that sum to 1."""
    most = 1 + 6 / math.sqrt(2 * df) if df > 8 else 4.0
    values = [(index + 0.5) * most / points for index in range(points)]
    logs = [(df - 1) * math.log(x) - df * x * x / 2 for x in values]
    top = max(logs)
    weights = [math.exp(log - top) for log in logs]
    total = sum(weights)
    return tuple((x, weight / total) for x, weight in zip(values, weights, strict=True))


def _beta(x: float, rest: float, a: float, b: float) -> float:
    """The regularized incomplete beta function at x. ``rest`` is 1 - x, passed separately for precision near 1."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest))
    if x < (a + 1) / (a + b + 2):
        return front * _continued_fraction(x, a, b) / a
    return 1 - front * _continued_fraction(rest, b, a) / b


def _continued_fraction(x: float, a: float, b: float) -> float:
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
