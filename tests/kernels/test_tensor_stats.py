"""Tensor statistics: every exponent is in its bin, and the kernel equals its reference."""

import math

import pytest
import torch

from narrowgauge import kernels
from narrowgauge.kernels import tensor_stats
from narrowgauge.kernels.tensor_stats import BINS, BLOCK, StatsTable, add_statistics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECIAL = [0.0, -0.0, 1.0, -1.5, 2.0**-126, 2.0**-140, 1e18, math.inf, -math.inf, math.nan, 65504.0, 2.0**-24]


def read(x, inverse=None):
    table = StatsTable.make(3, DEVICE)
    add_statistics(table, 1, x.to(DEVICE), inverse)
    assert not table.counts[0].any() and not table.counts[2].any() and not table.sizes[[0, 2]].any()
    return table.counts[1].cpu(), table.sizes[1].cpu()


@pytest.fixture(params=["kernel", "reference"])
def kernel_or_reference(request, monkeypatch):
    if DEVICE == "cuda" and request.param == "reference":
        monkeypatch.setattr("narrowgauge.kernels.tensor_stats.use_triton", lambda _: False)
    monkeypatch.setattr(kernels, "interpreting", request.param == "kernel")


@pytest.mark.usefixtures("kernel_or_reference")
def test_special_values_are_in_the_right_bins():
    counts, sizes = read(torch.tensor(SPECIAL))
    assert counts.sum() == len(SPECIAL) + 1  # NaN counts twice: as nonfinite and as NaN
    assert counts[0] == 2 and counts[255] == 3 and counts[BINS] == 1
    assert counts[1] == 2  # 2**-126 and 2**-140
    assert counts[127] == 2 and counts[127 + 15] == 1 and counts[127 - 24] == 1
    assert sizes[0] == torch.tensor(1e18) and sizes[1].item() == pytest.approx(1e36, rel=1e-5)


@pytest.mark.usefixtures("kernel_or_reference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (4096,), (37, 211), (3, 5000), (0,)])
def test_histogram_amax_and_squares(dtype, shape):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    counts, sizes = read(x)
    wanted = torch.zeros(BINS + 1, dtype=torch.int64)
    for value in x.flatten().tolist():
        wanted[0 if value == 0 else max(1, math.frexp(value)[1] + 126)] += 1
    assert torch.equal(counts, wanted)
    if x.numel():
        assert sizes[0] == x.abs().max().float()
        assert sizes[1].item() == pytest.approx(x.double().square().sum().item(), rel=1e-5)


@pytest.mark.usefixtures("kernel_or_reference")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_statistics_are_of_the_unscaled_values(dtype):
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    counts, sizes = read(x, torch.tensor(2.0**-6, device=DEVICE))
    plain, plain_sizes = read(x.float() * 2.0**-6)
    assert torch.equal(counts, plain) and torch.equal(sizes[0], plain_sizes[0])


@pytest.mark.usefixtures("kernel_or_reference")
def test_views_and_several_tensors_in_a_row():
    x = torch.randn(64, 48)
    table = StatsTable.make(1, DEVICE)
    for part in (x.t()[:10], x.t()[10:]):
        add_statistics(table, 0, part.to(DEVICE))
    whole = StatsTable.make(1, DEVICE)
    add_statistics(whole, 0, x.to(DEVICE))
    assert torch.equal(table.counts, whole.counts) and table.sizes[0, 0] == whole.sizes[0, 0]


@pytest.mark.usefixtures("kernel_or_reference")
def test_large_tensors_are_sampled_by_blocks(monkeypatch):
    monkeypatch.setattr(tensor_stats, "WHOLE", 2 * BLOCK)
    x = torch.randn(11 * BLOCK - 100, generator=torch.Generator().manual_seed(0))
    x[BLOCK + 7], x[BLOCK + 8], x[2 * BLOCK + 5] = math.inf, math.nan, 999.0
    counts, sizes = read(x)
    seen = torch.cat([x[:BLOCK], x[5 * BLOCK : 6 * BLOCK], x[10 * BLOCK :]])  # every fifth: 11 / 2, rounded to odd
    exact, _ = read(seen[: 2 * BLOCK])
    exact += read(seen[2 * BLOCK :])[0]
    assert torch.equal(counts[:255], exact[:255])
    assert counts[255] == 2 and counts[BINS] == 1 and sizes[0] == 999.0
    finite = x[x.isfinite()]
    assert sizes[1].item() == pytest.approx(finite.double().square().sum().item(), rel=1e-5)
