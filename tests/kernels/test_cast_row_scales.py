"""Casts with a scale for each row: the reference is right value by value, and the kernels match the reference."""

import pytest
import torch
from oracle import KERNEL, assert_same, draw, hardware_rounding  # noqa: F401
from torch._subclasses import FakeTensorMode

from narrowgauge.errors import UsageError
from narrowgauge.formats import round_to
from narrowgauge.kernels.cast_row_scales import cast_row_scales, cast_row_scales_reference
from narrowgauge.kernels.fp8_formats import FP8_FORMATS, FP8_MAX

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
pytestmark = pytest.mark.usefixtures("hardware_rounding")


def draw_rows(*shape, dtype=torch.bfloat16):
    """Return rows of very different sizes: zeros, tiny and huge numbers, with inf, with NaN."""
    x = draw(*shape, dtype=torch.float32)
    x[0] = 0
    x[1] *= 2.0**-140 if dtype is torch.float32 else 2.0**-80  # the interpreter loses the subnormals of BF16
    x[2] *= 2.0**100
    x[3, 1], x[4, 2], x[5, 0] = torch.inf, torch.nan, -torch.inf
    x[5, 1] = torch.nan
    return x.to(dtype)


@FORMATS
@pytest.mark.parametrize("margin", [0, 2])
def test_each_row_is_rounded_as_its_format_says(dtype, margin):
    x = draw(32, 48, dtype=torch.float32)
    x[7] = 0
    made = cast_row_scales_reference(x, dtype, margin=margin)
    name = FP8_FORMATS[dtype].name
    for values, lp, inverse in ((x, made.lp, made.inv_scale), (x.t(), made.lp_t, made.inv_scale_t)):
        assert lp.is_contiguous() and lp.shape == values.shape and inverse.shape == (len(values), 1)
        for row, stored, inv in zip(values, lp.float(), inverse[:, 0], strict=True):
            largest = row.abs().max().item()
            scale = torch.tensor(FP8_MAX[dtype]) / largest / 2**margin if largest else torch.tensor(1.0)
            assert inv == 1 / scale
            assert stored.tolist() == round_to((row * scale).numpy(), name, saturate=True).tolist()
    assert torch.equal(made.amax, x.abs().amax(1)) and made.amax[7] == 0 and not made.saturated.any()
    assert torch.equal(made.flushed.sum(), ((made.lp.float() == 0) & (x != 0)).sum())


@FORMATS
def test_a_row_with_inf_or_nan_has_no_finite_value(dtype):
    x = draw_rows(16, 32)
    made = cast_row_scales_reference(x, dtype)
    bad = ~torch.isfinite(x.float())
    assert torch.equal(made.inv_scale.isnan()[:, 0], bad.any(1))
    assert torch.equal(made.inv_scale_t.isnan()[:, 0], bad.any(0))
    assert torch.equal(~torch.isfinite(made.amax), bad.any(1))
    assert (made.lp.float() * made.inv_scale)[bad.any(1)].isnan().all()
    assert torch.isfinite(made.lp.float() * made.inv_scale)[~bad.any(1)].all()


@KERNEL
@FORMATS
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(128, 64), (144, 208), (1040, 24), (16, 16)])
def test_the_kernels_match_the_reference(shape, of, transposed, dtype):
    if (of is torch.float32) != (shape[0] == 144):
        pytest.skip("one shape in FP32 is enough")
    x = draw_rows(*shape, dtype=of)
    assert_alike(cast_row_scales(x, dtype, transposed, 1), cast_row_scales_reference(x, dtype, transposed, 1))


@KERNEL
def test_rows_may_have_other_strides_and_numbers():
    x = draw_rows(32, 64)
    wanted = cast_row_scales_reference(x, E4M3)
    wide = torch.zeros(32, 100, dtype=x.dtype)
    wide[:, 4:68] = x
    assert_alike(cast_row_scales(wide[:, 4:68], E4M3), wanted)
    assert_alike(cast_row_scales(x.t().contiguous().t(), E4M3), wanted)
    assert_alike(cast_row_scales(x[:7], E4M3), cast_row_scales_reference(x[:7], E4M3))
    assert_alike(cast_row_scales(x[:7], E4M3, False), cast_row_scales_reference(x[:7], E4M3, False))


def assert_alike(made, wanted):
    for name, mine, theirs in zip(made._fields, made, wanted, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
        if mine.dtype in (E4M3, E5M2):
            assert_same(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("transposed", [True, False])
def test_the_op_promises_what_it_returns(transposed):
    x = draw(32, 48)
    made = cast_row_scales(x, E5M2, transposed)
    with FakeTensorMode() as mode:
        fake = cast_row_scales(mode.from_tensor(x), E5M2, transposed)
    for mine, theirs in zip(made, fake, strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


def test_only_matrices_and_fp8():
    for x, dtype in ((torch.zeros(2, 2, 2), E4M3), (torch.zeros(2, 2), torch.float16)):
        with pytest.raises(UsageError, match=r"expected (a matrix|float8)"):
            cast_row_scales(x, dtype)
