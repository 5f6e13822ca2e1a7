"""Casts with a scale for each block: the reference is right value by value, and the kernel matches the reference."""

import pytest
import torch
from oracle import KERNEL, assert_same, draw, hardware_rounding  # noqa: F401
from torch._subclasses import FakeTensorMode

from narrowgauge.errors import UsageError
from narrowgauge.formats import round_to
from narrowgauge.kernels.block_product import multiply_blocks, multiply_blocks_reference
from narrowgauge.kernels.cast_block_scales import (
    cast_block_scales,
    cast_block_scales_reference,
    count_blocks,
    expand_scales,
)
from narrowgauge.kernels.fp8_formats import FP8_FORMATS, FP8_MAX

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
SQUARE = pytest.mark.parametrize("square", [False, True], ids=["rows", "square"])
pytestmark = pytest.mark.usefixtures("hardware_rounding")


def draw_blocks(*shape, dtype=torch.bfloat16):
    """Return values of very different sizes: zeros, tiny and huge numbers, with inf, with NaN."""
    x = draw(*shape, dtype=torch.float32)
    x[0] = 0
    x[1] *= 2.0**-140 if dtype is torch.float32 else 2.0**-80  # the interpreter loses the subnormals of BF16
    x[2] *= 2.0**100
    x[3, 1], x[4, 2], x[-1, 0] = torch.inf, torch.nan, -torch.inf
    return x.to(dtype)


@SQUARE
@FORMATS
@pytest.mark.parametrize("margin", [0, 2])
def test_each_block_is_rounded_as_its_format_says(dtype, margin, square):
    x = draw(144, 300, dtype=torch.float32)
    x[:, 9] *= 1000
    x[7] = 0
    made = cast_block_scales_reference(x, dtype, margin=margin, square=square)
    name = FP8_FORMATS[dtype].name
    for values, lp, inverse in ((x, made.lp, made.inv_scale), (x.t(), made.lp_t, made.inv_scale_t)):
        rows, columns = values.shape
        high = 128 if square else 1
        assert lp.is_contiguous() and lp.shape == values.shape
        assert inverse.shape == (-(-rows // high), -(-columns // 128))
        for down in range(len(inverse)):
            for across in range(inverse.shape[1]):
                part = slice(down * high, (down + 1) * high), slice(across * 128, (across + 1) * 128)
                largest = values[part].abs().max().item()
                scale = torch.tensor(FP8_MAX[dtype]) / largest / 2**margin if largest else torch.tensor(1.0)
                assert inverse[down, across] == 1 / scale
                wanted = round_to((values[part] * scale).numpy(), name, saturate=True)
                assert (lp[part].float().numpy() == wanted).all()
    assert torch.equal(made.amax, x.abs().amax(1)) and made.amax[7] == 0 and not made.saturated.any()
    assert torch.equal(made.flushed.sum(), ((made.lp.float() == 0) & (x != 0)).sum())
    if square:
        assert torch.equal(made.lp_t.view(torch.uint8), made.lp.t().contiguous().view(torch.uint8))
        assert torch.equal(made.inv_scale_t, made.inv_scale.t())


@SQUARE
def test_a_block_with_inf_or_nan_has_no_finite_value(square):
    x = draw_blocks(140, 200).float()
    made = cast_block_scales_reference(x, E4M3, square=square)
    bad = ~torch.isfinite(x)
    value = made.lp.float() * expand_scales(made.inv_scale, *x.shape)
    assert value[bad].isnan().all()
    assert torch.equal(~torch.isfinite(made.amax), bad.any(1))
    counted = sum(
        int(bad[r : r + 128 if square else r + 1, c : c + 128].any())
        for r in range(0, 140, 128 if square else 1)
        for c in range(0, 200, 128)
    )
    assert made.inv_scale.isnan().sum() == counted > 0


@KERNEL
@SQUARE
@FORMATS
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(128, 256), (144, 208), (528, 24), (16, 16)])
def test_the_kernel_matches_the_reference(shape, of, transposed, dtype, square):
    if (of is torch.float32) != (shape[0] == 144):
        pytest.skip("one shape in FP32 is enough")
    x = draw_blocks(*shape, dtype=of)
    made = cast_block_scales(x, dtype, transposed, 1, square)
    assert_alike(made, cast_block_scales_reference(x, dtype, transposed, 1, square))


@KERNEL
def test_rows_may_have_other_strides_and_numbers():
    x = draw_blocks(32, 64)
    wanted = cast_block_scales_reference(x, E4M3)
    wide = torch.zeros(32, 100, dtype=x.dtype)
    wide[:, 4:68] = x
    assert_alike(cast_block_scales(wide[:, 4:68], E4M3), wanted)
    assert_alike(cast_block_scales(x.t().contiguous().t(), E4M3), wanted)
    assert_alike(cast_block_scales(x[:7], E4M3), cast_block_scales_reference(x[:7], E4M3))
    assert_alike(cast_block_scales(x[:7], E4M3, False), cast_block_scales_reference(x[:7], E4M3, False))


def assert_alike(made, wanted):
    for name, mine, theirs in zip(made._fields, made, wanted, strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride()), name
        if mine.dtype in (E4M3, E5M2):
            assert_same(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@SQUARE
@pytest.mark.parametrize("transposed", [True, False])
def test_the_op_promises_what_it_returns(transposed, square):
    x = draw(160, 48)
    made = cast_block_scales(x, E5M2, transposed, 0, square)
    with FakeTensorMode() as mode:
        fake = cast_block_scales(mode.from_tensor(x), E5M2, transposed, 0, square)
    for mine, theirs in zip(made, fake, strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


def test_only_matrices_and_fp8():
    for x, dtype in ((torch.zeros(2, 2, 2), E4M3), (torch.zeros(2, 2), torch.float16)):
        with pytest.raises(UsageError, match=r"expected (a matrix|float8)"):
            cast_block_scales(x, dtype)


@pytest.mark.parametrize("scales", ["blocks-square", "blocks-blocks", "blocks-tensor", "row-square"])
@pytest.mark.parametrize("depth", [384, 208, 64])
def test_products_divide_each_block_by_its_scale(depth, scales):
    torch.manual_seed(0)
    a = cast_block_scales_reference(torch.randn(48, depth), E5M2)
    b = cast_block_scales_reference(torch.randn(160, depth), E4M3, square=True)
    vectors = cast_block_scales_reference(torch.randn(160, depth), E4M3)
    kinds = {"blocks": a.inv_scale, "row": torch.rand(48, 1)}, {"square": b.inv_scale, "tensor": torch.tensor(0.5)}
    first, second = scales.split("-")
    inv_a, inv_b = kinds[0][first], kinds[1].get(second, vectors.inv_scale)
    weight = vectors.lp if second == "blocks" else b.lp
    bias = torch.randn(160, dtype=torch.bfloat16)
    made = multiply_blocks(a.lp, weight, inv_a, inv_b, torch.float32, bias)
    wanted = torch.zeros(48, 160, dtype=torch.float64)
    for block in range(count_blocks(depth)):  # a sum of products of blocks
        part = slice(block * 128, (block + 1) * 128)
        of_a = inv_a[:, min(block, inv_a.shape[1] - 1)].double()[:, None]
        of_b = inv_b.double() if inv_b.dim() == 0 else inv_b[:, block].double()[:, None]
        if inv_b.dim() and len(inv_b) != 160:
            of_b = of_b.repeat_interleave(128, 0)[:160]
        wanted += (a.lp[:, part].double() * of_a) @ (weight[:, part].double() * of_b).t()
    size = float(wanted.abs().max())
    torch.testing.assert_close(made.double(), wanted + bias.double(), rtol=1e-5, atol=1e-5 * size)
    again = multiply_blocks_reference(a.lp, weight, inv_a, inv_b, torch.bfloat16)
    torch.testing.assert_close(again.double(), wanted, rtol=2**-8, atol=1e-5 * size)
