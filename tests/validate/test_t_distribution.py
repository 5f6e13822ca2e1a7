"""Student's t compared with SciPy."""

import math

import pytest

from narrowgauge.validate.statistics.t_distribution import normal_cdf, t_cdf, t_quantile, tabulate_deviation

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("df", [1, 2, 3, 7, 30, 400])
def test_t_distribution(df):
    for t in (-40.0, -3.0, -0.5, 0.0, 1e-6, 0.7, 2.0, 12.0):
        assert t_cdf(t, df) == pytest.approx(stats.t.cdf(t, df), rel=1e-9, abs=1e-12)
    for p in (0.5, 0.8, 0.95, 0.995):
        assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-8, abs=1e-6)


def test_normal_distribution():
    for z in (-8.0, -1.0, 0.0, 2.5):
        assert normal_cdf(z) == pytest.approx(stats.norm.cdf(z), rel=1e-12)


@pytest.mark.parametrize("df", [1, 2, 5, 40, 300])
def test_distribution_of_a_standard_deviation(df):
    points = tabulate_deviation(df)
    assert sum(weight for _, weight in points) == pytest.approx(1)
    for limit in (0.6, 1.0, 1.3):
        below = sum(weight for x, weight in points if x <= limit)
        assert below == pytest.approx(stats.chi2.cdf(df * limit**2, df), abs=0.01)
    assert math.fsum(w * x * x for x, w in points) == pytest.approx(1, rel=0.02)
