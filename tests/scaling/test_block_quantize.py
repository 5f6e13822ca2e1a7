"""Block quantization in torch equals the exact reference bit for bit; stochastic rounding has no bias."""

from __future__ import annotations

import importlib
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowgauge.block_formats import BLOCK_FORMATS, decode_scale, quantize_exactly
from narrowgauge.errors import UsageError
from narrowgauge.formats import decode
from narrowgauge.scaling.block_quantize import QuantizedBlocks, quantize_blocks, random_hadamard

MX_CASES = [(name, rule) for name, f in BLOCK_FORMATS.items() if f.scale == "e8m0" for rule in ("floor", "up")]
CASES = [*MX_CASES, ("nvfp4", "floor")]
EVERY_CASE = pytest.mark.parametrize(("name", "rule"), CASES)
EVERY_FORMAT = pytest.mark.parametrize("name", BLOCK_FORMATS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def assert_exact(x: torch.Tensor, name: str, rule: str = "floor", amax: float | None = None) -> QuantizedBlocks:
    """Compare codes, scales and values with the reference, and return them."""
    found = quantize_blocks(x, name, scale_rule=rule, amax=amax)
    wanted = quantize_exactly(x.float().numpy(), name, scale_rule=rule, amax=amax)
    np.testing.assert_array_equal(found.scales.view(torch.uint8).numpy(), wanted.scales)
    np.testing.assert_array_equal(found.codes.numpy(), wanted.codes)
    np.testing.assert_array_equal(np.nan if found.tensor_scale is None else found.tensor_scale.item(),
                                  np.nan if wanted.tensor_scale is None else wanted.tensor_scale)  # fmt: skip
    with np.errstate(over="ignore"):  # FP32's largest numbers may be rounded up to 2**128
        values = wanted.values.astype(np.float32)
    read = found.dequantize().numpy()
    np.testing.assert_array_equal(read, values)
    np.testing.assert_array_equal(np.signbit(read) & ~np.isnan(read), np.signbit(values) & ~np.isnan(values))
    return found


def list_boundaries(name: str) -> np.ndarray:
    """Return the numbers of an element format and all midpoints, and some beyond, with both signs."""
    f = BLOCK_FORMATS[name].element
    numbers = np.array([decode(code, f) for code in range(f.max_code + 1)])
    sizes = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, f.max * np.array([1.01, 1.05, 1.1, 1.14])])
    return np.concatenate([sizes, -sizes])


def with_neighbors(values: np.ndarray) -> np.ndarray:
    """Return each value as FP32, and the FP32 numbers below and above it."""
    near = np.clip(values, -3.4e38, 3.4e38).astype(np.float32)
    return np.concatenate([np.nextafter(near, np.float32(side)) for side in (-np.inf, np.inf)] + [near])


def put_in_blocks(values: np.ndarray, anchor: float, block: int) -> torch.Tensor:
    """Return rows of one block: values, and last the number that determines the block's scale."""
    padded = np.concatenate([values, np.zeros(-len(values) % (block - 1), np.float32)]).reshape(-1, block - 1)
    return torch.from_numpy(np.concatenate([padded, np.full((len(padded), 1), anchor, np.float32)], 1))


@pytest.mark.parametrize(("name", "rule"), MX_CASES)
@pytest.mark.parametrize("exponent", [-127, -126, -100, -3, 0, 60, 110])
def test_every_boundary_of_mx_elements_and_its_neighbors(name: str, rule: str, exponent: int) -> None:
    """Each block has the element format's largest number, times the scale. With ``floor``, larger ones saturate."""
    largest = BLOCK_FORMATS[name].element.max
    values = with_neighbors(list_boundaries(name) * 2.0**exponent)
    values = values[np.abs(values) <= largest * 2.0**exponent] if rule == "up" else values
    found = assert_exact(put_in_blocks(values, largest * 2.0**exponent, 32), name, rule)
    assert set(found.scales.view(torch.uint8).flatten().tolist()) == {exponent + 127}


@pytest.mark.parametrize("amax", [2688.0, 1.0, 0.1, 3.3e38, 7e-30, 1.7e-38, 2.0**-130])
def test_every_boundary_of_nvfp4_elements_and_its_neighbors(amax: float) -> None:
    """A boundary times both scales needs up to 31 bits, so FP32 numbers lie closely on both sides of it."""
    amax = float(np.float32(amax))
    tensor_scale = quantize_exactly([amax], "nvfp4").tensor_scale
    for code in (1, 7, 8, 13, 0x35, 0x4B, 0x7D, 0x7E):
        scale = decode(code, "fp8_e4m3") * tensor_scale
        values = with_neighbors(list_boundaries("nvfp4") * scale)
        values = values[np.abs(values) <= np.float32(6 * scale)]
        assert_exact(put_in_blocks(values, 6 * scale, 16), "nvfp4", amax=amax)


@pytest.mark.parametrize("amax", [2688.0, 1.0, 0.1, 3.3e38, 7e-30, 2.0**-128])
def test_every_boundary_of_nvfp4_scales_and_its_neighbors(amax: float) -> None:
    amax = float(np.float32(amax))
    tensor_scale = quantize_exactly([amax], "nvfp4").tensor_scale
    scales = np.array([decode(code, "fp8_e4m3") for code in range(0x7F)])
    middle = (scales[1:] + scales[:-1]) / 2
    largest = np.unique(np.abs(with_neighbors(np.concatenate([scales, middle, [460.0, 500.0]]) * 6 * tensor_scale)))
    rows = np.zeros((len(largest), 16), np.float32)
    rows[:, 5], rows[:, 6] = -largest, largest / 3
    assert_exact(torch.from_numpy(rows), "nvfp4", amax=amax)


def make_wide(shape: tuple[int, ...], span: int, seed: int) -> torch.Tensor:
    """Return normal numbers times random powers of two."""
    draw = torch.Generator().manual_seed(seed)
    return torch.ldexp(torch.randn(shape, generator=draw), torch.randint(-span, span + 1, shape, generator=draw))


@EVERY_CASE
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_tensors_of_many_magnitudes(name: str, rule: str, dtype: torch.dtype) -> None:
    for seed, span in enumerate((0, 3, 20, 130)):
        assert_exact(make_wide((3, 80), span, seed).to(dtype), name, rule)


@EVERY_CASE
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=30)  # the machine may be busy
@given(data=st.data())
def test_any_numbers(name: str, rule: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """Subnormals, the largest numbers, zeros, inf and NaN, in blocks that are not full."""
    size = data.draw(st.integers(1, 40))
    numbers = st.floats(width=16 if dtype == torch.float16 else 32)
    few = data.draw(st.lists(numbers, min_size=1, max_size=size))
    spread = torch.tensor(few).repeat(-(-size // len(few)))[:size] * torch.tensor([1.0, -0.75] * size)[:size]
    assert_exact(spread.to(dtype)[None], name, rule)


@EVERY_FORMAT
def test_special_values(name: str) -> None:
    largest = torch.finfo(torch.float32).max
    for values in ([0.0, -0.0], [largest, -largest, 1.0], [math.inf, 1.0], [-math.inf], [math.nan, -0.0], [-1e-45],
                   [1e-45, 1.2e-38, -3e-39], [math.nan, math.inf]):  # fmt: skip
        for dtype in DTYPES:
            x = torch.zeros(2, 70)
            x[0, 33 : 33 + len(values)] = torch.tensor(values)
            x[1, :40] = 1.0
            found = assert_exact(x.to(dtype), name)
            assert found.dequantize().isnan().any() == (not x.to(dtype).isfinite().all())


def test_amax_is_a_number_or_a_tensor() -> None:
    x = make_wide((2, 64), 2, 0)
    given = quantize_blocks(x, "nvfp4", amax=torch.tensor([[100.0]], requires_grad=True))
    assert given.tensor_scale is not None and given.tensor_scale.shape == () and not given.tensor_scale.requires_grad
    assert torch.equal(given.codes, assert_exact(x, "nvfp4", amax=100.0).codes)
    assert torch.equal(quantize_blocks(x, "nvfp4", amax=x.abs().max()).codes, quantize_blocks(x, "nvfp4").codes)
    saturated = assert_exact(x, "nvfp4", amax=0.25).dequantize()
    assert saturated.abs().max() == pytest.approx(0.25)
    assert assert_exact(x, "nvfp4", amax=math.inf).dequantize().isnan().all()


def test_scales_are_read_as_defined() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for name in ("mxfp4", "nvfp4"):
        scales = codes.view(quantize_blocks(torch.ones(1), name).scales.dtype).float()
        np.testing.assert_array_equal(scales.numpy(), [decode_scale(code, name) for code in range(256)])


@EVERY_FORMAT
def test_every_element_code_is_read_exactly(name: str) -> None:
    f = BLOCK_FORMATS[name]
    codes = torch.arange(1 << f.element.bits, dtype=torch.uint8)[None]
    wanted = np.array([decode(code, f.element) for code in range(codes.shape[1])])
    for code in (0, 1, 2, 60, 127, 128, 200, 0x7E) if f.scale == "e8m0" else (0, 1, 9, 0x38, 0x7E):
        scales = torch.full((1, -(-codes.shape[1] // f.block)), code, dtype=torch.uint8)
        scales = scales.view(quantize_blocks(torch.ones(1), name).scales.dtype)
        tensor_scale = torch.tensor(0.7) if f.tensor_scale else None
        blocks = QuantizedBlocks(codes, scales, tensor_scale, f)
        exact = wanted * decode_scale(code, name)
        np.testing.assert_array_equal(blocks.dequantize(apply_tensor_scale=False)[0].numpy(), exact)
        in_bf16 = blocks.dequantize(torch.bfloat16, apply_tensor_scale=False)[0].float().numpy()
        kept = ~np.isfinite(exact) | (np.abs(exact) >= 2.0**-126) | (exact == 0)
        np.testing.assert_array_equal(in_bf16[kept], exact[kept])
        factor = 1.0 if tensor_scale is None else float(tensor_scale)
        np.testing.assert_array_equal(blocks.dequantize()[0].numpy(), (exact * factor).astype(np.float32))


@EVERY_FORMAT
def test_shapes_and_strides(name: str) -> None:
    x = make_wide((6, 5, 37), 2, 1)
    found = quantize_blocks(x, name, rounding="nearest")
    count = -(-37 // BLOCK_FORMATS[name].block)
    assert found.shape == found.codes.shape == x.shape and found.scales.shape == (6, 5, count)
    assert found.dequantize(torch.bfloat16).dtype == torch.bfloat16 and found.dequantize().shape == x.shape
    before = x.clone()
    turned = quantize_blocks(x.transpose(0, 2), name)
    assert torch.equal(turned.codes, quantize_blocks(x.transpose(0, 2).contiguous(), name).codes)
    assert torch.equal(x, before), "the input is not overwritten"
    for empty in (torch.zeros(3, 0), torch.zeros(0, 64)):
        assert quantize_blocks(empty, name).dequantize().shape == empty.shape
    assert quantize_blocks(torch.ones(5), name).dequantize().tolist() == pytest.approx([1.0] * 5)


@EVERY_FORMAT
def test_fake_and_meta_tensors(name: str) -> None:
    for rounding in ("nearest", "stochastic"):
        meta = quantize_blocks(torch.empty(4, 40, device="meta", dtype=torch.bfloat16), name, rounding=rounding)
        assert (meta.dequantize().shape, meta.codes.dtype) == ((4, 40), torch.uint8)
        with FakeTensorMode():
            assert quantize_blocks(torch.empty(4, 40), name, rounding=rounding).dequantize().shape == (4, 40)
    assert not quantize_blocks(torch.ones(4, 32, requires_grad=True), name).dequantize().requires_grad


def test_wrong_arguments() -> None:
    x = torch.ones(4, 32)
    with pytest.raises(UsageError, match="unknown rounding 'up': expected one of nearest, stochastic"):
        quantize_blocks(x, "mxfp4", rounding="up")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"cannot quantize torch.float64 with 2 dim.*: expected FP32, BF16 or FP16"):
        quantize_blocks(x.double(), "mxfp4")
    with pytest.raises(UsageError, match=r"torch.float32 with 0 dimensions"):
        quantize_blocks(torch.tensor(1.0), "mxfp4")
    with pytest.raises(UsageError, match="leave it out for NVFP4"):
        quantize_blocks(x, "nvfp4", scale_rule="up")
    with pytest.raises(UsageError, match="leave it out for MXFP4"):
        quantize_blocks(x, "mxfp4", amax=1.0)
    with pytest.raises(UsageError, match="unknown block format"):
        quantize_blocks(x, "mxfp6")


@EVERY_FORMAT
def test_elements_agree_with_ml_dtypes(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kinds = {"fp4_e2m1": "float4_e2m1fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    f = BLOCK_FORMATS[name]
    x = make_wide((256, 256), 3, 5)
    x[0, 0] = 2688.0 * 4  # a power of two as NVFP4's tensor scale
    found = quantize_blocks(x, name)
    kind = ml_dtypes.float8_e8m0fnu if f.scale == "e8m0" else ml_dtypes.float8_e4m3fn
    scales = found.scales.view(torch.uint8).numpy().view(kind).astype(np.float32).repeat(f.block, 1)
    scales *= 1.0 if found.tensor_scale is None else found.tensor_scale.item()
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(scales == 0, 0, x.numpy() / scales)
    # NVFP4's quotients are rounded to float32 first, so the cast may go wrong at a midpoint: none of these is at one.
    elements = np.clip(np.copysign(scaled, x.numpy()), -f.element.max, f.element.max)
    elements = elements.astype(getattr(ml_dtypes, kinds[f.element.name]))
    np.testing.assert_array_equal(found.codes.numpy(), elements.view(np.uint8))


def test_agrees_with_torchao() -> None:
    """Compared with torchao's main branch of August 2026: MX with FLOOR and RCEIL, and NVFP4 with two levels of scales.

    MX is equal in every bit, also of inf, NaN, zeros and subnormals (except for the elements of blocks that are NaN).
    NVFP4: the scales are equal where they are at least 2**-6, to which torchao raises smaller ones. Elements are equal
    for these FP32 inputs. With BF16 inputs, x / scale is often within 2**-24 of a tie, and torchao, which multiplies by
    a reciprocal in FP32, takes the other neighbor in about 1 of 1,000 cases.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
            nv = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
            kernels = importlib.import_module("torchao.prototype.mx_formats.kernels")
        except ImportError as missing:
            pytest.skip(f"no torchao with MX formats: {missing}")
    modes = {"floor": mx.ScaleCalculationMode.FLOOR, "up": mx.ScaleCalculationMode.RCEIL}
    dtypes = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2, "mxfp4": torch.float4_e2m1fn_x2}
    anything = torch.randint(-(2**31), 2**31 - 1, (512, 256), generator=torch.Generator().manual_seed(0))
    tensors = [make_wide((512, 256), span, span) for span in (0, 100)] + [anything.to(torch.int32).view(torch.float32)]
    for x in [*tensors, *(x.bfloat16() for x in tensors)]:
        for name, rule in MX_CASES:
            scales, data = mx.to_mx(x, dtypes[name], 32, modes[rule])
            data = kernels.unpack_uint4(data) if name == "mxfp4" else data.view(torch.uint8)
            found = quantize_blocks(x, name, scale_rule=rule)
            assert torch.equal(found.scales.view(torch.uint8), scales.view(torch.uint8))
            known = (scales.view(torch.uint8) != 255).repeat_interleave(32, -1)
            assert torch.equal(found.codes[known], data.view(x.shape)[known])
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    for x, most in ((tensors[0], 0.0), (tensors[0].bfloat16(), 0.003)):
        scales, data = nv.nvfp4_quantize(x, 16, nv.per_tensor_amax_to_scale(x.abs().max()))
        found = quantize_blocks(x, "nvfp4")
        assert torch.equal(found.scales.view(torch.uint8), scales.view(torch.uint8).view(found.scales.shape))
        differs = found.codes != kernels.unpack_uint4(data).view(x.shape)
        scale = found.scales.double().repeat_interleave(16, -1) * found.tensor_scale.double()
        quotients = (x / scale).abs()[differs][:, None]
        assert differs.float().mean() <= most and ((quotients / ties - 1).abs().amin(1) < 2.0**-23).all()


@pytest.mark.parametrize(("name", "rule", "nearest", "stochastic"), [
    ("mxfp8_e4m3", "floor", 30.65, 28.09), ("mxfp8_e4m3", "up", 31.52, 28.51), ("mxfp8_e5m2", "floor", 25.36, 22.46),
    ("mxfp8_e5m2", "up", 25.54, 22.51), ("mxfp4", "floor", 18.79, 15.99), ("mxfp4", "up", 18.75, 15.67),
    ("nvfp4", "floor", 20.43, 17.24),
])  # fmt: skip
def test_signal_to_noise_ratio_of_normal_numbers(name: str, rule: str, nearest: float, stochastic: float) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(512, 1024, generator=draw)
    for rounding, wanted in (("nearest", nearest), ("stochastic", stochastic)):
        y = quantize_blocks(x, name, scale_rule=rule, rounding=rounding, generator=draw).dequantize()
        found = 10 * math.log10(x.square().sum() / (x - y).square().sum())
        print(f"{name} {rule} {rounding}: {found:.2f} dB")
        assert found == pytest.approx(wanted, abs=0.1)
    assert BLOCK_FORMATS[name].decibels[rule] == pytest.approx(nearest, abs=0.06)


@EVERY_CASE
def test_stochastic_rounding_takes_a_neighbor_and_keeps_the_mean(name: str, rule: str) -> None:
    """The mean of n draws, in units of its standard deviation, is beyond 6.5 with a probability of 1e-10 a value."""
    f, n, draw = BLOCK_FORMATS[name], 20_000, torch.Generator().manual_seed(3)
    largest = f.element.max
    scale = 2.0**-5 if f.scale == "e8m0" else 2.0 * 0.8125
    amax = None if f.scale == "e8m0" else 2688.0 * 2
    values = torch.rand(f.block * 6, generator=draw).pow(3) * largest * scale
    values *= torch.randint(0, 2, values.shape, generator=draw) * 2 - 1
    values.view(-1, f.block)[:, -1] = largest * scale  # the anchor
    values.view(-1, f.block)[:, 0] = -0.0
    numbers = np.array([decode(code, f.element) for code in range(1 << f.element.bits)])
    numbers = torch.from_numpy(np.unique(numbers[np.isfinite(numbers)])) * scale
    below = numbers[torch.searchsorted(numbers, values.double(), right=True) - 1]
    above = numbers[torch.searchsorted(numbers, values.double())]
    blocks = quantize_blocks(
        values.expand(n, -1), name, rounding="stochastic", generator=draw, scale_rule=rule, amax=amax
    )
    found = blocks.dequantize().double()
    assert ((found == below) | (found == above)).all()
    deviation = ((values - below) * (above - values) / n).sqrt()
    error = (found.mean(0) - values).abs()
    assert (error[deviation == 0] == 0).all(), "numbers of the format do not change"
    assert (error / deviation)[deviation > 0].max() < 6.5
    assert (found.min(0).values == below).float().mean() > 0.8, "both neighbors occur"
    assert (found.max(0).values == above).float().mean() > 0.8


@EVERY_FORMAT
def test_stochastic_rounding_repeats_with_a_generator_and_saturates(name: str) -> None:
    x = make_wide((64, 96), 4, 8)
    first, again, other = (
        quantize_blocks(x, name, rounding="stochastic", generator=torch.Generator().manual_seed(seed)).codes
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    beyond = torch.full((1, BLOCK_FORMATS[name].block), 1.99)  # above E4M3's 1.75 and E2M1's 1.5 times a power of two
    amax = {"amax": 0.5} if name == "nvfp4" else {}
    assert set(quantize_blocks(beyond, name, rounding="stochastic", **amax).codes.flatten().tolist()) == {
        BLOCK_FORMATS[name].element.max_code
    }
    bad = quantize_blocks(torch.tensor([[1.0, math.nan]]), name, rounding="stochastic")
    assert bad.dequantize().isnan().all() and not bad.codes.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@EVERY_CASE
def test_cuda_equals_cpu(name: str, rule: str) -> None:
    for dtype in DTYPES:
        x = make_wide((64, 200), 100, 4).to(dtype)
        here, there = (quantize_blocks(y, name, scale_rule=rule) for y in (x, x.cuda()))
        assert torch.equal(here.codes, there.codes.cpu())
        assert torch.equal(here.scales.view(torch.uint8), there.scales.view(torch.uint8).cpu())
        assert torch.equal(here.dequantize().nan_to_num(7.0), there.dequantize().cpu().nan_to_num(7.0))


def make_signs(block: int) -> torch.Tensor:
    return torch.randint(0, 2, (block,), generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("block", [1, 2, 16, 32])
def test_products_do_not_change_under_a_hadamard_transform(block: int) -> None:
    draw, signs = torch.Generator().manual_seed(1), make_signs(block)
    a, b = (torch.randn(9, 3 * block, dtype=torch.float64, generator=draw) for _ in range(2))
    left, right = (random_hadamard(x, block=block, signs=signs) for x in (a, b))
    torch.testing.assert_close(left @ right.T, a @ b.T, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(left.norm(dim=1), a.norm(dim=1), rtol=1e-13, atol=0)
    matrix = random_hadamard(torch.eye(block, dtype=torch.float64), block=block, signs=signs)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(block, dtype=torch.float64), rtol=0, atol=1e-15)
    sylvester = torch.ones(1, 1, dtype=torch.float64)
    while len(sylvester) < block:
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), sylvester)
    torch.testing.assert_close(matrix, torch.diag(signs.double()) @ sylvester / math.sqrt(block))


def test_a_hadamard_transform_spreads_outliers_and_keeps_the_dtype() -> None:
    signs = make_signs(16)
    x = torch.zeros(1, 32)
    x[0, 5] = 8.0
    assert random_hadamard(x, signs=signs).abs().tolist() == [[2.0] * 16 + [0.0] * 16]
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    for dtype in (torch.bfloat16, torch.float16):
        low = x.to(dtype)
        assert torch.equal(random_hadamard(low, signs=signs), random_hadamard(low.float(), signs=signs).to(dtype))


def test_a_hadamard_transform_has_a_gradient_and_checks_sizes() -> None:
    x = torch.randn(2, 3, 32, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: random_hadamard(y, signs=make_signs(16)), x)
    for wrong in ({"block": 12}, {"block": 64}, {"signs": make_signs(8)}):
        with pytest.raises(UsageError, match="expected a power of two, a multiple of it, and one sign each"):
            random_hadamard(x, **{"block": 16, "signs": make_signs(16), **wrong})
