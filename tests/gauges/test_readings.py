"""What formats would lose of a tensor, from its histogram, compared with what they lose of the tensor itself."""

import math

import numpy
import pytest
import torch

from narrowgauge.formats import find_format
from narrowgauge.gauges.watch.readings import Reading, read_counts
from narrowgauge.kernels.tensor_stats import StatsTable, add_statistics


def reading(x, **fields):
    table = StatsTable.make(1, "cpu")
    add_statistics(table, 0, x)
    amax, squares = table.sizes[0].tolist()
    kind = {"kind": "activation", "module": "m", "dtype": "fp32"}
    counts = read_counts(table.counts[0].tolist(), x.numel(), amax)
    return Reading(**kind | fields, amax=amax, mean_square=squares / x.numel(), **counts)


def lost(x, name, scale):
    """The shares of the nonzero values that are really flushed, subnormal or overflow."""
    known = find_format(name)
    size = (x.double().abs() * scale)[x != 0]
    flushed = size <= known.smallest_subnormal / 2
    subnormal = ~flushed & (size < known.smallest_normal)
    return [part.double().mean().item() for part in (flushed, subnormal, size > known.max)]


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 3e-4])
def test_shares_match_what_formats_lose(name, scale):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40_000, generator=generator) * torch.exp2(torch.randn(40_000, generator=generator) * 9 - 4)
    shares = reading(x).shares(name, scale)
    wanted = lost(x, name, scale)
    assert [shares.flushed, shares.subnormal, shares.overflow] == pytest.approx(wanted, abs=0.012)


def test_the_best_scale_fills_the_format():
    x = torch.randn(1000) * 1e-6
    for name in ("fp16", "e4m3"):
        scale = reading(x).best_scale(name)
        assert math.log2(scale).is_integer()
        assert find_format(name).max / 2 < x.abs().max().item() * scale <= find_format(name).max
        assert reading(x).shares(name, scale).overflow == 0
    assert reading(torch.zeros(4)).best_scale("fp16") == 1.0


def test_nonfinite_values_are_counted_separately():
    found = reading(torch.tensor([0.0, 1.0, math.inf, -math.inf, math.nan]))
    assert (found.count, found.zeros, found.inf, found.nan, found.amax) == (5, 1, 2, 1, 1.0)
    assert found.exponents == {0: 1} and found.zero_share == 0.2


@pytest.mark.parametrize("values", [[], [0.0], [1e-30, 5.0, 0.0, math.nan]])
def test_event_round_trip(values):
    found = reading(torch.tensor(values), kind="update", lost=0.25, ratio=1e-3, scale=2.0) if values else Reading(
        kind="weight", module="a.b", dtype="bf16", count=0
    )  # fmt: skip
    assert Reading.from_event(found.as_event()) == found
    assert numpy.isfinite(found.amax)


def test_counts_of_a_sample_are_scaled_to_the_whole_tensor():
    bins = [0] * 257
    bins[0], bins[127], bins[128], bins[255], bins[256] = 30, 60, 10, 3, 2
    found = read_counts(bins, 1003, 2.5)
    assert found == {"count": 1003, "zeros": 300, "inf": 1, "nan": 2, "exponents": {0: 600, 1: 100}}
    nearly = read_counts([100] + [0] * 256, 1000, 1e-9)
    assert nearly["zeros"] == 999  # not all: a value outside the sample is larger
    assert read_counts([100] + [0] * 256, 1000, 0.0)["zeros"] == 1000
