"""Student's t against SciPy."""

import math

import pytest

from narrowgauge.validate.statistics.t_distribution import normal_cdf, spread, t_cdf, t_quantile

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 30, 400])
def test_t(freedom):
    for t in (-40.0, -3.0, -0.5, 0.0, 1e-6, 0.7, 2.0, 12.0):
        assert t_cdf(t, freedom) == pytest.approx(stats.t.cdf(t, freedom), rel=1e-9, abs=1e-12)
    for p in (0.5, 0.8, 0.95, 0.995):
        assert t_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-8, abs=1e-6)


def test_normal():
    for z in (-8.0, -1.0, 0.0, 2.5):
        assert normal_cdf(z) == pytest.approx(stats.norm.cdf(z), rel=1e-12)


@pytest.mark.parametrize("freedom", [1, 2, 5, 40, 300])
def test_the_spread_of_a_standard_deviation(freedom):
    points = spread(freedom)
    assert sum(weight for _, weight in points) == pytest.approx(1)
    for limit in (0.6, 1.0, 1.3):
        below = sum(weight for x, weight in points if x <= limit)
        assert below == pytest.approx(stats.chi2.cdf(freedom * limit**2, freedom), abs=0.01)
    assert math.fsum(w * x * x for x, w in points) == pytest.approx(1, rel=0.02)
