"""Downsampling keeps the mean and the extremes of curves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from narrowgauge.report.downsample import bin_marks, downsample, round_number


def test_short_curve_is_unchanged() -> None:
    curve = downsample(np.array([1.0, 2.0, 3.0]), np.array([5.5, math.nan, 4.25]))
    assert curve == {"x": [1, 2, 3], "y": [5.5, None, 4.25], "per": 1}
    assert downsample(np.array([]), np.array([]))["x"] == []


def test_long_curve_keeps_mean_and_spikes() -> None:
    steps = np.arange(1.0, 100_001.0)
    values = np.ones(100_000)
    values[54_321], values[70_000] = 1e6, -7.0
    values[[10, 11]] = math.inf, math.nan
    curve = downsample(steps, values)
    assert len(curve["x"]) == len(curve["y"]) == 2000 and curve["per"] == 50
    assert max(curve["hi"]) == 1e6 and min(curve["lo"]) == -7
    assert curve["y"][0] == 1, "means ignore values that are not finite"
    assert np.mean(curve["y"]) == pytest.approx((99_996 + 1e6 - 7) / 100_000, rel=1e-3)
    assert curve["x"] == sorted(curve["x"]) and curve["x"][0] == 25.5


def test_stepped_curves_keep_original_values() -> None:
    steps = np.arange(1.0, 5001.0)
    scale = np.where(steps < 2600, 65536.0, 32768.0)
    curve = downsample(steps, scale, 100, last=True)
    assert set(curve["y"]) == {65536, 32768}
    broken = np.full(10, math.nan)
    assert downsample(steps[:10], broken, 2, last=True)["y"] == [None, None]


def test_marks_are_listed_or_binned() -> None:
    steps = np.arange(1.0, 10_001.0)
    few = np.isin(steps, [7, 9000])
    assert bin_marks(steps, few, 100) == [[7, 1], [9000, 1]]
    many = steps % 2 == 0
    counted = bin_marks(steps, many, 100)
    assert len(counted) == 100 and sum(n for _, n in counted) == 5000


@pytest.mark.parametrize(("value", "shown"), [(2.0**20, 1048576), (1 / 3, 0.333333), (math.inf, None), (None, None)])
def test_numbers_are_rounded(value: float | None, shown: float | None) -> None:
    assert round_number(value) == shown
