"""Sums of FP8 rows: the kernel matches plain torch for all shapes, and is the same at every run."""

import pytest
import torch

from narrowgauge.kernels.sum_rows import sum_rows, sum_rows_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(1, 16), (70, 130), (200, 48), (4, 300)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_the_kernel_matches_the_reference(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    torch.testing.assert_close(sum_rows(x), sum_rows_reference(x), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(sum_rows(x.t().contiguous(), transposed=True), sum_rows_reference(x))
    assert torch.equal(sum_rows(x), sum_rows(x))


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter turns NaN of FP8 into a number")
def test_nan_is_not_lost():
    x = torch.zeros(40, 32)
    x[13, 5] = torch.nan
    assert torch.isnan(sum_rows(x.to(torch.float8_e5m2).to(DEVICE))).nonzero().tolist() == [[5]]


def test_no_rows():
    assert torch.equal(sum_rows(torch.empty(0, 32, dtype=torch.float8_e5m2, device=DEVICE)).cpu(), torch.zeros(32))
