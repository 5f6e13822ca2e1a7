"""Norms: references match torch's autograd in FP64, and kernels match the references."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowgauge import kernels
from narrowgauge.errors import UsageError
from narrowgauge.kernels import norm as module
from narrowgauge.kernels.norm import (
    norm,
    norm_backward,
    norm_backward_normalized,
    norm_backward_reference,
    norm_reference,
)

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's, in the interpreter
KINDS = ["layer", "rms"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STEP = {E4M3: 2.0**-3, E5M2: 2.0**-2}  # the largest relative distance between adjacent values
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(rows, columns, dtype=torch.float32, seed=0, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) + offset).to(DEVICE, dtype)


def draw_weight(columns, dtype=torch.float32):
    return 1 + 0.1 * draw(1, columns, seed=7)[0].to(dtype)


NOT_NORMALIZED = ("", None, None, None, None)
"""The last arguments of a backward that reads the residual stream."""


def forward(kernel, x, weight, bias=None, eps=1e-5, kind="layer", branch=None, scale=None, dtype=torch.float32, **out):
    arguments = x, weight, bias, eps, kind, branch, scale, dtype, out.get("amax"), out.get("counts"), None
    return (module._forward if kernel else norm_reference)(*arguments)


def backward(
    kernel, grad_output, residual, weight, mean, rstd, grad_residual=None, has_bias=False, scale=None, dtype=E5M2, **out
):
    arguments = grad_output, residual, weight, mean, rstd, grad_residual, has_bias, scale, dtype
    run = module._backward if kernel else norm_backward_reference
    return run(*arguments, out.get("amax"), out.get("counts"), *NOT_NORMALIZED)


def assert_within_a_step(lp, hp, dtype):
    """Compare within one FP8 step, since Triton's interpreter does not round as the hardware does.

    Ties and subnormals differ by up to a step, and a value that rounds up to a power of two loses the carry: 1.95
    becomes 1. tests/gpu compares the casts bit for bit.
    """
    lp, hp, right = lp.float(), hp.float(), hp.to(dtype).float()
    near = (lp - hp).abs() <= torch.clamp(STEP[dtype] * hp.abs(), min=SMALLEST[dtype])
    lost_carry = (lp * 2 == right) & (torch.frexp(right).mantissa.abs() == 0.5) & (hp.abs() < right.abs())
    assert (near | lost_carry).all()


@pytest.fixture
def make_statistics():
    """Return a function that makes a new amax and new counts."""
    return lambda: {
        "amax": torch.zeros(1, device=DEVICE),
        "counts": torch.zeros(2, dtype=torch.int64, device=DEVICE),
    }


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_references_match_torch_and_autograd_in_fp64(kind, bias):
    x, branch, grad_output, grad_residual = (draw(17, 40, torch.float64, seed, offset=1.0) for seed in range(4))
    weight, shift = draw_weight(40, torch.float64).requires_grad_(), draw(1, 40, torch.float64, 5)[0].requires_grad_()
    b = shift if bias else None
    x.requires_grad_()
    stream = x + branch
    if kind == "layer":
        expected = F.layer_norm(stream, (40,), weight, b, 1e-5)
    else:
        expected = F.rms_norm(stream, (40,), weight, 1e-5) + (0 if b is None else b)
    ((expected * grad_output).sum() + (stream * grad_residual).sum()).backward()

    with torch.no_grad():
        out, residual, mean, rstd = forward(False, x, weight, b, kind=kind, branch=branch, dtype=torch.float64)
        mean = mean if kind == "layer" else None
        grad_input, grad_input_lp, grad_weight, grad_bias = backward(
            False, grad_output, residual, weight, mean, rstd, grad_residual, bias
        )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(residual, stream)
    torch.testing.assert_close(grad_input, x.grad)
    torch.testing.assert_close(grad_weight, weight.grad)
    if bias:
        torch.testing.assert_close(grad_bias, shift.grad)
    assert grad_input_lp.numel() == 0


# Incomplete groups of rows, incomplete blocks of columns, columns not divisible by four, one of each, the widest.
SHAPES = [(37, 768), (5, 100), (9, 7), (1, 1), (3, 1536), (130, 64), (1, 3000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_kernel_matches_the_reference(kind, shape):
    x, branch = draw(*shape, offset=3.0), draw(*shape, torch.bfloat16, 1)
    weight, bias = draw_weight(shape[1]), draw(1, shape[1], seed=3)[0]
    for options in ({}, {"branch": branch}, {"branch": branch, "bias": bias}):
        got = forward(True, x, weight, kind=kind, **options)
        expected = forward(False, x, weight, kind=kind, **options)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
        assert (got[1].numel() == 0) == (not options)
        assert (got[2].numel() == 0) == (kind == "rms")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_kernel_matches_the_reference(kind, shape):
    x, grad_output, grad_residual = draw(*shape, offset=1.0), draw(*shape, torch.bfloat16, 1), draw(*shape, seed=2)
    weight = draw_weight(shape[1])
    _, _, mean, rstd = forward(False, x, weight, kind=kind, eps=1e-2)
    mean = mean if kind == "layer" else None
    combinations = (
        {"grad_residual": grad_residual.bfloat16(), "has_bias": True},
        {},
        {"grad_residual": grad_residual},
    )
    # The interpreter takes one program for each 16 columns of each sum; options do not depend on the width.
    for options in combinations[: None if DEVICE == "cuda" or shape[1] < 500 else 1]:
        got = backward(True, grad_output, x, weight, mean, rstd, **options)
        expected = backward(False, grad_output, x, weight, mean, rstd, **options)
        for ours, theirs in zip(got[:1] + got[2:], expected[:1] + expected[2:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(37, 768), (9, 100)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_output_with_amax_and_counts(kind, shape, make_statistics):
    x, weight, bias = draw(*shape, offset=1.0), draw_weight(shape[1]), draw(1, shape[1], seed=3)[0]
    scale = torch.tensor([200.0], device=DEVICE)  # 448 / 200: some saturate
    bias[::3] = 0
    x[3, ::2] = x[3, 1::2]  # zeros, which the kernel does not count
    weight[::5] = 1e-8  # flushed
    got, expected = make_statistics(), make_statistics()
    b = None if kind == "rms" else bias
    out = forward(True, x, weight, b, kind=kind, scale=scale, dtype=E4M3, **got)[0]
    wide = forward(False, x, weight, b, kind=kind)[0]
    reference = forward(False, x, weight, b, kind=kind, scale=scale, dtype=E4M3, **expected)[0]
    assert out.dtype == reference.dtype == E4M3
    assert_within_a_step(out, (wide * scale).clamp(-448, 448), E4M3)
    torch.testing.assert_close(got["amax"], expected["amax"])
    assert got["amax"].item() == pytest.approx(wide.abs().max().item(), rel=1e-5)
    assert got["counts"].tolist() == expected["counts"].tolist()
    assert (got["counts"] > 0).all()


@pytest.mark.parametrize("interpret", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_wide_output_with_statistics_of_a_later_cast(kind, dtype, interpret, monkeypatch, make_statistics):
    """They are those of an output in FP8, and the output is that of a call without them."""
    monkeypatch.setattr(kernels, "interpreting", interpret)
    x, weight, branch = draw(37, 96, offset=1.0), draw_weight(96), draw(37, 96, torch.bfloat16, 1)
    weight[::5] = 1e-8
    scale, of_cast, of_wide = torch.tensor([200.0], device=DEVICE), make_statistics(), make_statistics()
    options = {"eps": 1e-5, "kind": kind, "branch": branch, "keep": True}
    cast = norm(x, weight, scale=scale, dtype=E4M3, **of_cast, **options)
    wide = norm(x, weight, scale=scale, dtype=dtype, later=E4M3, **of_wide, **options)
    plain = norm(x, weight, dtype=dtype, **options)
    assert wide.out.dtype == dtype and torch.equal(wide.out, plain.out)
    assert torch.equal(wide.normalized, cast.normalized) and torch.equal(wide.residual, cast.residual)
    for name, value in of_cast.items():
        assert torch.equal(of_wide[name], value) and (value > 0).all(), name
    fake = torch.ops.narrowgauge.norm.default
    arguments = (x, weight, None, 1e-5, kind, branch, scale, dtype, *of_wide.values(), None, E4M3)
    torch.library.opcheck(fake, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_gradient_with_amax_and_counts(kind, make_statistics):
    shape = (37, 100)
    x, grad_output, grad_residual = draw(*shape, offset=5.0), draw(*shape, torch.bfloat16, 1), draw(*shape, seed=2)
    grad_residual[::4] = 0
    grad_output[::4] = 1e-30  # values near 1e-30 are flushed
    weight = draw_weight(100)
    _, _, mean, rstd = forward(False, x, weight, kind=kind)
    mean = mean if kind == "layer" else None
    scale = torch.tensor([2.0**15], device=DEVICE)
    got, expected = make_statistics(), make_statistics()
    grad_input, grad_input_lp, _, _ = backward(
        True, grad_output, x, weight, mean, rstd, grad_residual, scale=scale, **got
    )
    wide, _, _, _ = backward(False, grad_output, x, weight, mean, rstd, grad_residual, scale=scale, **expected)
    torch.testing.assert_close(grad_input, wide, rtol=1e-4, atol=1e-4)
    assert grad_input_lp.dtype == E5M2
    assert_within_a_step(grad_input_lp, (grad_input * scale).clamp(-57344, 57344), E5M2)
    torch.testing.assert_close(got["amax"], grad_input.abs().max()[None])
    assert got["counts"].tolist() == expected["counts"].tolist()
    assert (got["counts"] > 0).all()


@pytest.mark.parametrize("interpret", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_streams_gradient_in_bf16(kind, interpret, monkeypatch, make_statistics):
    """Only the stream's own gradient is rounded: its FP8 copy, amax and the weight's gradient stay as they are."""
    monkeypatch.setattr(kernels, "interpreting", interpret)
    shape = (37, 100)
    x, grad_output, grad_residual = draw(*shape, offset=1.0), draw(*shape, torch.bfloat16, 1), draw(*shape, seed=2)
    weight, scale = draw_weight(100), torch.tensor([2.0**10], device=DEVICE)
    _, _, mean, rstd = forward(False, x, weight, kind=kind)
    mean, found = mean if kind == "layer" else None, []
    for dtype in (None, torch.bfloat16):
        stats = make_statistics()
        made = norm_backward(
            grad_output, x, weight, mean, rstd, kind=kind, grad_residual=grad_residual, has_bias=True, scale=scale,
            stream_dtype=dtype, **stats,
        )  # fmt: skip
        found.append((made, stats))
    (wide, of_wide), (short, of_short) = found
    assert wide[0].dtype is torch.float32 and short[0].dtype is torch.bfloat16
    torch.testing.assert_close(short[0].float(), wide[0], rtol=2**-7, atol=0)  # the interpreter truncates
    assert all(torch.equal(a, b) for a, b in zip(wide[1:], short[1:], strict=True))
    assert torch.equal(of_wide["amax"], of_short["amax"]) and torch.equal(of_wide["counts"], of_short["counts"])


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_amax_keeps_nan_and_inf(value, make_statistics):
    weight = draw_weight(100)
    weight[99] = value
    for kernel in (True, False):
        out = make_statistics() | {"counts": None}
        forward(kernel, draw(5, 100), weight, kind="rms", **out)
        assert not out["amax"].isfinite().any()
        forward(kernel, draw(5, 100), draw_weight(100), kind="rms", **out)  # a later, finite call does not hide it
        assert not out["amax"].isfinite().any()


def test_amax_only_rises(make_statistics):
    out = make_statistics() | {"counts": None}
    out["amax"].fill_(100.0)
    forward(True, draw(5, 100), draw_weight(100), **out)
    assert out["amax"].item() == 100.0


def test_empty_groups_of_rows_do_not_change_amax(make_statistics):
    """Rows beyond the end are zeros: with eps 0, normalizing them would give 0 * inf."""
    for kind in KINDS:
        out = make_statistics() | {"counts": None}
        forward(True, draw(9, 64), draw_weight(64), eps=0.0, kind=kind, **out)
        assert out["amax"].isfinite().all()


def test_bf16_stream_is_normed_as_stored():
    x, branch, weight = draw(33, 96, torch.bfloat16), draw(33, 96, torch.bfloat16, 1), draw_weight(96, torch.bfloat16)
    got = norm(x, weight, eps=1e-5, branch=branch)
    assert got.residual.dtype == got.out.dtype == torch.bfloat16
    assert got.mean.dtype == got.rstd.dtype == torch.float32
    torch.testing.assert_close(got.residual, (x.float() + branch.float()).bfloat16(), rtol=2**-7, atol=0)
    torch.testing.assert_close(got.mean, got.residual.float().mean(1), rtol=1e-5, atol=1e-6)
    grad_input, grad_input_lp, grad_weight, grad_bias = norm_backward(x, got.residual, weight, got.mean, got.rstd)
    assert (grad_input.dtype, grad_input_lp, grad_weight.dtype, grad_bias) == (
        torch.bfloat16,
        None,
        torch.float32,
        None,
    )


def test_rows_with_a_large_mean_stay_accurate():
    x = draw(8, 768, offset=1e4)
    expected = F.layer_norm(x.double(), (768,), eps=1e-5)
    out = norm(x, torch.ones(768, device=DEVICE), eps=1e-5, dtype=torch.float32).out
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=2e-3)  # x itself is only accurate to 1e-3


def test_gradients_in_any_layout():
    x, weight = draw(48, 64), draw_weight(64)
    normed = norm(x, weight, eps=1e-5)
    grad_output = draw(64, 48, torch.bfloat16).t()
    plain = norm_backward(grad_output.contiguous(), x, weight, normed.mean, normed.rstd)
    strided = norm_backward(
        grad_output, x, weight, normed.mean, normed.rstd, grad_residual=x.new_zeros(()).expand(48, 64)
    )
    assert torch.equal(plain[0], strided[0])
    assert torch.equal(plain[2], strided[2])


def test_no_rows():
    x, weight = draw(0, 64), draw_weight(64)
    normed = norm(x, weight, eps=1e-5, branch=x, amax=torch.zeros(1, device=DEVICE))
    assert normed.out.shape == (0, 64)
    grad_input, _, grad_weight, grad_bias = norm_backward(
        x.bfloat16(), x, weight, normed.mean, normed.rstd, has_bias=True
    )
    assert grad_input.shape == (0, 64)
    assert not grad_weight.any()
    assert not grad_bias.any()


@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ops_pass_opcheck(kind, interpret, monkeypatch):
    """torch's opcheck of schema, fake shapes and mutation, for the kernels and (on a CPU) the references."""
    monkeypatch.setattr(kernels, "interpreting", interpret)
    x, weight = draw(6, 32), draw_weight(32)
    amax, counts = torch.zeros(1, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    checks = ("test_schema", "test_faketensor")
    mean = x.mean(1) if kind == "layer" else None
    for scale in (None, torch.ones(1, device=DEVICE)):
        watch = (amax, None if scale is None else counts)
        for extra in (None, x.bfloat16()):
            dtype = torch.bfloat16 if scale is None else E4M3
            arguments = (x, weight, None, 1e-5, kind, extra, scale, dtype, *watch, x.bfloat16())
            torch.library.opcheck(torch.ops.narrowgauge.norm.default, arguments, test_utils=checks)
            arguments = (x.bfloat16(), x, weight, mean, x[:, 0].abs(), extra, extra is None, scale, E5M2, *watch)
            arguments += NOT_NORMALIZED
            torch.library.opcheck(torch.ops.narrowgauge.norm_backward.default, arguments, test_utils=checks)


def test_fake_tensors_and_compile_see_the_op():
    with FakeTensorMode():
        x, weight = torch.empty(6, 32), torch.empty(32)
        normed = norm(x, weight, eps=1e-5, branch=x, scale=torch.ones(1), dtype=E4M3)
        assert (normed.out.shape, normed.out.dtype, normed.rstd.shape) == ((6, 32), E4M3, (6,))
        grad_input, grad_input_lp, grad_weight, _ = norm_backward(
            x, x, weight, normed.mean, normed.rstd, scale=torch.ones(1)
        )
        assert (grad_input.shape, grad_input_lp.dtype, grad_weight.shape) == ((6, 32), E5M2, (32,))

    amax = torch.zeros(1, device=DEVICE)

    def double(x, weight):
        return norm(x * 2, weight, eps=1e-5, kind="rms", amax=amax, dtype=torch.float32).out + 1

    x, weight = draw(6, 32), draw_weight(32)
    eager = double(x, weight)
    amax.zero_()
    compiled = torch.compile(double, backend="aot_eager", fullgraph=True)(x, weight)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(amax, (eager - 1).abs().max()[None])


def test_bad_input_raises():
    x, weight, scale = draw(4, 32), draw_weight(32), torch.ones(1, device=DEVICE)
    with pytest.raises(UsageError, match="kind=batch"):
        norm(x, weight, eps=1e-5, kind="batch")
    with pytest.raises(UsageError, match=r"\(4, 32\) and \(31,\)"):
        norm(x, weight[1:], eps=1e-5)
    with pytest.raises(UsageError, match=r"\(3, 32\)"):
        norm(x, weight, eps=1e-5, branch=x[1:])
    with pytest.raises(UsageError, match="FP8 output needs a scale"):
        norm(x, weight, eps=1e-5, dtype=E4M3)
    with pytest.raises(UsageError, match="FP8 output needs a scale"):
        norm(x, weight, eps=1e-5, scale=scale)
    with pytest.raises(UsageError, match="FP8 output needs a scale"):
        norm(x, weight, eps=1e-5, later=E4M3)
    with pytest.raises(UsageError, match="cannot be cast"):
        norm(x, weight, eps=1e-5, scale=scale, dtype=E4M3, later=E4M3)
    with pytest.raises(UsageError, match="needs the mean"):
        norm_backward(x, x, weight, None, x[:, 0])


@pytest.mark.parametrize("interpret", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(7, 96), (130, 64), (3, 1000)], ids=str)
def test_backward_from_normalized_rows(kind, shape, interpret, monkeypatch):
    """BF16 rows give the stream's gradient to -60 dB, those of parameters to -52, and about forward's output."""
    monkeypatch.setattr(kernels, "interpreting", interpret)
    truncates = interpret and DEVICE == "cpu"  # the interpreter, to BF16
    decibels = (50, 45, 45) if truncates else (60, 52, 52)
    x, grad_output, grad_residual = draw(*shape, offset=0.5), draw(*shape, torch.bfloat16, 1), draw(*shape, seed=2)
    weight, bias = draw_weight(shape[1]), draw(1, shape[1], seed=3)[0]
    by, scale = torch.tensor(32.0, device=DEVICE), torch.tensor([2.0**10], device=DEVICE)
    for b in (None, bias):
        made = norm(x, weight, b, eps=1e-5, kind=kind, scale=by, dtype=E4M3, keep=True)
        plain = forward(False, x, torch.ones_like(weight), kind=kind)[0]
        torch.testing.assert_close(made.normalized.float(), plain, rtol=2**-7, atol=1e-5)
        wanted = norm_backward(
            grad_output, x, weight, made.mean, made.rstd, kind=kind, grad_residual=grad_residual, has_bias=b is not None
        )
        got = norm_backward_normalized(
            grad_output, made.normalized, weight, b, made.rstd, x.dtype, kind=kind, grad_residual=grad_residual,
            scale=scale, forward_scale=by,
        )  # fmt: skip
        pairs = zip((got[0], got[2], got[3]), (wanted[0], wanted[2], wanted[3]), decibels, strict=True)
        for one, other, least in pairs:
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.dtype is torch.float32
                assert (one - other).norm() <= 10 ** (-least / 20) * other.norm()
        assert got[1].dtype is E5M2
        out, again = made.out.float(), got[4].float()
        if not interpret or DEVICE == "cuda":  # the interpreter loses carries
            assert ((again - out).abs() <= STEP[E4M3] * out.abs() + 0.3).all()  # 32 times BF16's error of a value of 2
        assert (again == out).float().mean() > 0.8


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("columns", [64, 512, 768, 896, 1024, 1536, 2048, 3072, 4096, 5120, 8192])
def test_all_programs_of_a_launch_run_at_once(columns, more):
    """What does not fit on a multiprocessor would start when all others have ended."""
    for config in (module.choose_forward_launch(columns, more), module.choose_backward_launch(columns, more)):
        limit = module._launch_constants(torch.empty(1, columns), config, torch.float8_e4m3fn, True)["maxnreg"]
        assert limit >= 40 and limit % 8 == 0  # ptxas allots eight at a time
        assert limit * 32 * config.warps * config.programs <= module.REGISTERS
        assert config.warps * config.programs <= 64
