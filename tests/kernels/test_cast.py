"""Casts: the reference matches ml_dtypes for every BF16 value, and the kernels match the reference."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from oracle import KERNEL, assert_same, assert_transposed, draw, hardware_rounding, statistics  # noqa: F401
from torch._subclasses import FakeTensorMode

from narrowgauge.errors import UsageError
from narrowgauge.formats import find_format
from narrowgauge.kernels import HAVE_TRITON, compute_scale, fp8_formats, fp8_tile, use_triton
from narrowgauge.kernels.cast import (
    cast,
    cast_transpose,
    cast_transpose_packed,
    cast_transpose_packed_reference,
    cast_transpose_reference,
    max_abs,
    max_abs_reference,
    pack,
    pack_reference,
    transpose,
    transpose_reference,
)
from narrowgauge.kernels.fp8_formats import FLUSH_THRESHOLD, FP8_MAX, SATURATION_THRESHOLD
from narrowgauge.kernels.fp8_tile import quantize_reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
pytestmark = pytest.mark.usefixtures("hardware_rounding")


@FORMATS
def test_formats_are_those_of_the_table(dtype):
    """Kernels have the constants of a format a second time."""
    name, largest, flush, saturation = fp8_formats.FP8_FORMATS[dtype]
    exact = find_format(name)
    step = exact.epsilon * 2.0 ** math.floor(math.log2(exact.max))
    assert (largest, flush, saturation) == (exact.max, exact.smallest_subnormal / 2, exact.max + step / 2)
    if HAVE_TRITON:
        assert fp8_formats.largest_of.fn(name) == largest
        assert fp8_formats.flush_threshold_of.fn(name) == flush
        assert fp8_formats.saturation_threshold_of.fn(name) == saturation


@FORMATS
def test_reference_is_the_saturating_cast_of_every_bf16_value(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    exact_dtype = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}[dtype]
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    x_lp = quantize_reference(x, torch.tensor(1.0), dtype)
    limit = FP8_MAX[dtype]
    with np.errstate(invalid="ignore"):  # NaN is among them
        expected = np.clip(x.float().numpy(), -limit, limit).astype(exact_dtype).astype(np.float32)
    np.testing.assert_array_equal(x_lp.float().numpy(), expected)


@FORMATS
def test_limits_are_those_of_the_format(dtype):
    info = torch.finfo(dtype)
    assert info.max == FP8_MAX[dtype]
    tiny = torch.tensor([FLUSH_THRESHOLD[dtype], math.nextafter(FLUSH_THRESHOLD[dtype], 1) * (1 + 1e-6)])
    assert quantize_reference(tiny, torch.tensor(1.0), dtype).float().ne(0).tolist() == [False, True]


@FORMATS
def test_statistics_of_the_reference(dtype):
    limit = SATURATION_THRESHOLD[dtype]
    x = torch.tensor([[0.0, -limit, limit * 1.01, 1e-30, -1e-30, 1.0, -torch.inf, 3.0]])
    amax, counts = statistics()
    quantize_reference(x[:, :6], torch.tensor(1.0), dtype, amax, counts)
    assert amax.item() == pytest.approx(limit * 1.01)
    assert counts.tolist() == [1, 2]
    quantize_reference(x, torch.tensor(1.0), dtype, amax, counts)
    assert amax.item() == math.inf
    assert counts.tolist() == [3, 4]
    quantize_reference(torch.tensor([[torch.nan]]), torch.tensor(1.0), dtype, amax, counts)
    assert math.isnan(amax.item())
    assert counts.tolist() == [3, 4]


@KERNEL
@FORMATS
@pytest.mark.parametrize("shape", [(128, 64), (48, 40), (130, 2), (5, 3), (1, 1), (144, 72), (16, 1)])
def test_cast_and_transpose_match_the_reference(dtype, shape):
    x, scale = draw(*shape), torch.tensor(3.0)
    assert use_triton(x)
    (amax, counts), (amax_reference, counts_reference) = statistics(), statistics()
    reference, _ = cast_transpose_reference(x, scale, dtype, amax_reference, counts_reference)
    x_lp, x_lp_t = cast_transpose(x, scale, dtype, amax, counts)
    assert_same(x_lp, reference)
    assert_transposed(x_lp_t, x_lp)
    assert torch.equal(amax, amax_reference)
    assert torch.equal(counts, counts_reference)
    assert_same(cast(x, scale, dtype, amax, counts), reference)
    assert counts.tolist() == [2 * n for n in counts_reference.tolist()]


@KERNEL
@pytest.mark.parametrize("rows", [256, 384, 512, 528, 640])
def test_rows_beyond_the_grids_second_dimension(rows, monkeypatch):
    monkeypatch.setattr(fp8_tile, "MAX_GRID_ROWS", 2)
    assert fp8_tile.tile_grid(rows, 64, {"BLOCK_N": 128, "BLOCK_D": 64}) == (1, 2, -(-rows // 256))
    x, scale = draw(rows, 64), torch.tensor(3.0)
    (amax, counts), (amax_reference, counts_reference) = statistics(), statistics()
    reference, _ = cast_transpose_reference(x, scale, E5M2, amax_reference, counts_reference)
    x_lp, x_lp_t = cast_transpose(x, scale, E5M2, amax, counts)
    assert_same(x_lp, reference)
    assert_transposed(x_lp_t, x_lp)
    assert torch.equal(amax, amax_reference) and torch.equal(counts, counts_reference)
    assert torch.equal(max_abs(x), max_abs_reference(x))


@KERNEL
@pytest.mark.parametrize("high", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_any_high_precision_and_any_row_stride(high):
    wide = draw(40, 96, dtype=torch.float32).clamp(-6e4, 6e4).to(high)
    scale = torch.tensor([0.5])
    for x in (wide[:, 8:56], wide.t(), wide[:1].expand(40, 96)):
        assert_same(cast_transpose(x, scale, E5M2)[0], quantize_reference(x, scale, E5M2).contiguous())


@KERNEL
def test_nan_and_inf_reach_the_amax():
    x = torch.ones(32, 32)
    for value in (math.inf, math.nan):
        x[7, 9] = value
        amax, counts = torch.zeros(()), torch.zeros(2, dtype=torch.int64)
        x_lp, _ = cast_transpose(x, torch.tensor(1.0), E4M3, amax, counts)
        assert torch.equal(torch.isnan(x_lp.float()), torch.isnan(x))
        np.testing.assert_equal(amax.item(), value)
        np.testing.assert_equal(max_abs(x).item(), value)
        assert counts.tolist() == [int(value == math.inf), 0]


@KERNEL
@FORMATS
@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 2), (3,)], ids=str)
@pytest.mark.parametrize("layout", ["bhtd", "packed"])
def test_packed_heads(dtype, heads, layout):
    batch, time, head = 2, 24, 8
    flat = draw(batch, time, sum(heads), head)
    parts = [part.transpose(1, 2) for part in flat.split(heads, dim=2)]
    if layout == "bhtd":
        parts = [part.contiguous() for part in parts]
    scale = torch.tensor(2.0)
    (amax, counts), (amax_reference, counts_reference) = statistics(), statistics()
    packed, packed_t = cast_transpose_packed(parts, scale, dtype, amax, counts)
    reference, reference_t = cast_transpose_packed_reference(parts, scale, dtype, amax_reference, counts_reference)
    assert_same(packed, reference)
    assert_transposed(packed_t, packed)
    assert torch.equal(pack(parts), pack_reference(parts).to(torch.bfloat16))
    assert_transposed(reference_t, reference)
    assert torch.equal(amax, amax_reference)
    assert torch.equal(counts, counts_reference)
    assert torch.equal(reference.view(torch.uint8), cast_reference(flat.flatten(2).flatten(0, 1), scale, dtype))


def cast_reference(x, scale, dtype):
    return quantize_reference(x, scale, dtype).view(torch.uint8)


@KERNEL
@FORMATS
@pytest.mark.parametrize("shape", [(128, 64), (32, 7), (80, 130), (30, 20), (1, 16)])
def test_transpose_moves_every_byte(dtype, shape):
    x_lp = torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)
    assert_transposed(transpose(x_lp), x_lp)
    assert_transposed(transpose_reference(x_lp), x_lp)


@KERNEL
def test_max_abs_of_any_shape():
    x = draw(70, 130)
    for view in (x, x[:, 5:77], x.t(), x.reshape(7, 10, 130), x[3], x[3, 4], x[:0]):
        assert torch.equal(max_abs(view), max_abs_reference(view))
        assert max_abs(view).dtype is torch.float32


@FORMATS
def test_compute_scale_maps_amax_to_the_largest_number(dtype):
    amax = torch.exp2(torch.arange(-80.0, 80.0, 0.37))
    torch.testing.assert_close(amax * compute_scale(amax, FP8_MAX[dtype]), torch.full_like(amax, FP8_MAX[dtype]))
    odd = torch.tensor([0.0, torch.inf, torch.nan])
    assert compute_scale(odd, FP8_MAX[dtype]).tolist() == [1.0, 1.0, 1.0]
    extreme = compute_scale(torch.tensor([1e-45, 3e38]), FP8_MAX[dtype])
    assert extreme.isfinite().all()
    assert extreme.reciprocal().isfinite().all()


@FORMATS
def test_rounding_to_the_largest_number_is_not_saturation(dtype):
    edge = SATURATION_THRESHOLD[dtype]
    x = torch.tensor([[FP8_MAX[dtype], edge, edge * 1.001, -edge * 2]])
    counts = torch.zeros(2, dtype=torch.int64)
    stored = cast(x, torch.ones(()), dtype, None, counts)
    assert counts.tolist() == [2, 0]
    assert stored.float().abs().eq(FP8_MAX[dtype]).all()


def test_empty_tensors():
    for dtype in FP8_MAX:
        x_lp, x_lp_t = cast_transpose(torch.empty(0, 16), torch.ones(()), dtype, *statistics())
        assert (x_lp.shape, x_lp_t.shape) == ((0, 16), (16, 0))
        assert transpose(x_lp).shape == (16, 0)


def test_mistakes_raise_clear_errors():
    with pytest.raises(UsageError, match="expected 2 dimensions"):
        cast(torch.zeros(2, 3, 4), torch.ones(()), E4M3)
    with pytest.raises(UsageError, match="float8_e4m3fn or float8_e5m2"):
        cast_transpose(torch.zeros(2, 3), torch.ones(()), torch.bfloat16)


def run_all_ops(x, parts, scale, amax, counts):
    return (
        cast(x, scale, E4M3, amax, counts),
        *cast_transpose(x, scale, E5M2, amax, counts),
        *cast_transpose_packed(parts, scale, E4M3, amax, None),
        transpose(cast(x, scale, E4M3)),
        max_abs(x),
    )


def test_fake_tensors_see_shapes_and_formats():
    x, parts = draw(32, 16), [draw(2, 2, 16, 8), draw(2, 1, 16, 8), draw(2, 1, 16, 8)]
    real = run_all_ops(x, parts, torch.ones(()), *statistics())
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(part) for part in parts]
        fake = run_all_ops(mode.from_tensor(x), fakes, torch.ones(()), *statistics())
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_compiled_calls_are_one_graph_with_equal_results():
    x, parts = draw(32, 16), [draw(2, 2, 16, 8), draw(2, 1, 16, 8), draw(2, 1, 16, 8)]
    (amax, counts), (amax_compiled, counts_compiled) = statistics(), statistics()
    eager = run_all_ops(x, parts, torch.ones(()), amax, counts)
    compiled = torch.compile(run_all_ops, backend="aot_eager", fullgraph=True)
    for one, other in zip(eager, compiled(x, parts, torch.ones(()), amax_compiled, counts_compiled), strict=True):
        one, other = (t.view(torch.uint8) if t.dtype in FP8_MAX else t for t in (one, other))
        assert torch.equal(one, other)
    assert torch.equal(amax, amax_compiled)
    assert torch.equal(counts, counts_compiled)


def test_without_triton_the_reference_runs():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from narrowgauge.kernels import activation, cast\n"
        "x_lp, x_lp_t = cast.cast_transpose(torch.ones(4, 2), torch.tensor(2.0), torch.float8_e4m3fn)\n"
        "assert x_lp_t.float().tolist() == [[2.0] * 4] * 2\n"
        'assert activation.activate("gelu", torch.zeros(4, 2))[0].shape == (4, 2)\n'
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
