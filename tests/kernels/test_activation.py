"""Activations: references match autograd in FP64, and kernels match the references."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracle import KERNEL, assert_same, assert_transposed, draw, hardware_rounding, statistics  # noqa: F401
from torch._subclasses import FakeTensorMode

from narrowgauge.errors import UsageError
from narrowgauge.kernels import FP8_MAX, activation, use_triton
from narrowgauge.kernels.activation import (
    gelu,
    gelu_backward,
    pointwise_reference,
    swiglu,
    swiglu_backward,
    swiglu_backward_reference,
)
from narrowgauge.kernels.fp8_tile import quantize_reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
VARIANTS = pytest.mark.parametrize("approximate", ["none", "tanh"])
# Two whole tiles; one incomplete; two by two, incomplete at both ends; lengths not divisible by 16; one column.
SHAPES = [(128, 64), (48, 40), (80, 72), (66, 2), (5, 3), (16, 1)]
# Tiles are the same for all functions, so the tanh variant needs fewer shapes.
CASES = pytest.mark.parametrize(
    ("shape", "approximate"), [*((shape, "none") for shape in SHAPES), ((48, 40), "tanh"), ((5, 3), "tanh")], ids=str
)
SCALE = torch.tensor(16.0)
pytestmark = pytest.mark.usefixtures("hardware_rounding")


def inputs(*shape):
    return draw(*shape, lowest=-3, highest=3)


def suffix(approximate):
    return "" if approximate == "none" else "_tanh"


def by_autograd(function, grad_output, *leaves):
    leaves = [leaf.double().requires_grad_() for leaf in leaves]
    output = function(*leaves)
    return output.detach(), torch.autograd.grad(output, leaves, grad_output.double())


@VARIANTS
def test_gelu_references_match_torch_in_fp64(approximate):
    u, grad_output = torch.linspace(-12, 12, 4096).view(64, 64), inputs(64, 64)
    value, (grad,) = by_autograd(lambda x: F.gelu(x, approximate=approximate), grad_output, u)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        forward = pointwise_reference(f"gelu{suffix(approximate)}", u.to(dtype))
        backward = pointwise_reference(f"gelu_backward{suffix(approximate)}", u.to(dtype), grad_output.to(dtype))
        torch.testing.assert_close(forward.double(), value, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(backward.double(), grad, rtol=10 * tolerance, atol=10 * tolerance)


def test_swiglu_references_match_torch_in_fp64():
    gate_up, grad_output = inputs(64, 96), inputs(64, 48)
    value, (grad,) = by_autograd(lambda x: F.silu(x.chunk(2, 1)[0]) * x.chunk(2, 1)[1], grad_output, gate_up)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        packed = gate_up.to(dtype)
        forward = pointwise_reference("swiglu", *packed.chunk(2, 1))
        torch.testing.assert_close(forward.double(), value, rtol=tolerance, atol=tolerance)
        backward = swiglu_backward_reference(grad_output.to(dtype), packed)
        torch.testing.assert_close(backward.double(), grad, rtol=tolerance, atol=tolerance)


def cases(shape, approximate="none"):
    """Return each op as (call, expected value in FP32, format)."""
    u, grad_output, gate_up = inputs(*shape), inputs(shape[0], shape[1]), inputs(shape[0], 2 * shape[1])
    tail = suffix(approximate)
    yield lambda *a, **k: gelu(u, *a, approximate=approximate, **k), pointwise_reference(f"gelu{tail}", u), E4M3
    yield (
        lambda *a, **k: gelu_backward(grad_output, u, *a, approximate=approximate, **k)[:2],
        pointwise_reference(f"gelu_backward{tail}", u, grad_output),
        E5M2,
    )
    if approximate == "none":
        value = pointwise_reference("swiglu", *gate_up.chunk(2, 1))
        yield lambda *a, **k: swiglu(gate_up, *a, **k), value, E4M3
        value = swiglu_backward_reference(grad_output, gate_up)
        yield lambda *a, **k: swiglu_backward(grad_output, gate_up, *a, **k)[:2], value, E5M2


@KERNEL
@CASES
def test_kernels_match_the_references(shape, approximate, monkeypatch):
    monkeypatch.setattr(activation, "TILE", activation.PAIR_TILE)  # smaller: two whole tiles in 128 rows
    for call, value, dtype in cases(shape, approximate):
        assert use_triton(value)
        (amax, counts), (amax_reference, counts_reference) = statistics(), statistics()
        reference = quantize_reference(value, SCALE, dtype, amax_reference, counts_reference)
        out, out_t = call(SCALE, dtype, amax=amax, counts=counts)
        # A last-bit difference of the exponential can change to which of two FP8 values a result rounds.
        assert_same(out, reference, steps=1)
        assert (out.float() == reference.float()).float().mean() > 0.98
        assert_transposed(out_t, out)
        torch.testing.assert_close(amax, amax_reference, rtol=1e-5, atol=0)
        assert (counts - counts_reference).abs().max() <= 1
        alone, none = call(SCALE, dtype, transposed=False)
        assert none is None
        assert_same(alone, out)
        plain, none = call()
        assert none is None
        assert plain.dtype is torch.bfloat16
        torch.testing.assert_close(plain.float(), value, rtol=2**-8, atol=1e-7)


@KERNEL
@CASES
def test_backward_recomputes_the_forward_output(shape, approximate):
    """The recomputed output has the bits of forward's, and the gradient does not change."""
    u, grad_output, gate_up = inputs(*shape), inputs(*shape), inputs(shape[0], 2 * shape[1])
    by = torch.tensor(9.0)
    for forward, backward in (
        (
            lambda: gelu(u, by, E4M3, approximate),
            lambda **k: gelu_backward(grad_output, u, SCALE, E5M2, approximate, **k),
        ),
        (lambda: swiglu(gate_up, by, E4M3), lambda **k: swiglu_backward(grad_output, gate_up, SCALE, E5M2, **k)),
    ):
        _, wanted = forward()
        plain, plain_t, none = backward()
        assert none is None
        out, out_t, again = backward(forward_scale=by)
        assert_same(again, wanted)
        assert_same(out, plain)
        assert_same(out_t, plain_t)


def test_the_polynomial_for_the_normal_integral():
    """FP32 input and output show its error, which BF16 and FP8 hide: 6e-6 of the value down to -6."""
    u = torch.linspace(-14, 14, 8192).view(64, 128)
    exact, (slope,) = by_autograd(F.gelu, torch.ones_like(u), u)
    value, _ = gelu(u, dtype=torch.float32)
    near = u > -6
    torch.testing.assert_close(value.double()[near], exact[near], rtol=1e-5, atol=0)
    assert (value.double() - exact)[~near].abs().max() < 1e-8
    grad, *_ = gelu_backward(torch.ones_like(u), u, dtype=torch.float32)
    torch.testing.assert_close(grad.double(), slope, rtol=1e-5, atol=2e-6)


@KERNEL
@VARIANTS
def test_extremes_give_no_nan(approximate):
    u = torch.tensor([[-3e38, -1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 1e4, 3e38, math.inf]])
    value, _ = gelu(u, dtype=torch.float32, approximate=approximate)
    assert torch.equal(value, torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 20.0, 1e4, 3e38, math.inf]]))
    amax = torch.zeros(1)
    out, _ = gelu(torch.tensor([[1.0, math.nan]]), SCALE, E4M3, approximate, amax)
    assert torch.isnan(out.float()).tolist() == [[False, True]]
    assert torch.isnan(amax).all()


@KERNEL
def test_any_strides():
    wide = inputs(40, 96)
    for u in (wide[:, 8:56], wide.t(), wide[:1].expand(40, 96)):
        assert_same(gelu(u, SCALE, E4M3)[0], gelu(u.contiguous(), SCALE, E4M3)[0])
        assert_same(gelu_backward(u, u, SCALE, E5M2)[0], gelu_backward(u.clone(), u.clone(), SCALE, E5M2)[0])
        grad_output = u[:, : u.shape[1] // 2]
        assert_same(
            swiglu_backward(grad_output, u, SCALE, E5M2)[0],
            swiglu_backward(grad_output.clone(), u.clone(), SCALE, E5M2)[0],
        )


def run_all_ops(u, grad_output, gate_up, amax, counts):
    scale = torch.ones(())
    pairs = (
        gelu(u, scale, E4M3, "none", amax, counts),
        gelu(u, approximate="tanh"),
        gelu_backward(grad_output, u, scale, E5M2, "tanh", amax, counts)[:2],
        gelu_backward(grad_output, u, scale, E5M2, transposed=False)[:2],
        swiglu(gate_up, scale, E4M3, amax, None),
        swiglu_backward(grad_output, gate_up, scale, E5M2, None, counts, forward_scale=scale),
    )
    return [tensor for pair in pairs for tensor in pair]


def test_fake_tensors_see_shapes_and_formats():
    tensors = inputs(32, 16), inputs(32, 16), inputs(32, 32)
    real = run_all_ops(*tensors, *statistics())
    with FakeTensorMode() as mode:
        fake = run_all_ops(*map(mode.from_tensor, tensors), *statistics())
    for one, other in zip(real, fake, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_compiled_calls_are_one_graph_with_equal_results():
    tensors = inputs(32, 16), inputs(32, 16), inputs(32, 32)
    (amax, counts), (amax_compiled, counts_compiled) = statistics(), statistics()
    eager = run_all_ops(*tensors, amax, counts)
    compiled = torch.compile(run_all_ops, backend="aot_eager", fullgraph=True)(*tensors, amax_compiled, counts_compiled)
    for one, other in zip(eager, compiled, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            one, other = (t.view(torch.uint8) if t.dtype in FP8_MAX else t for t in (one, other))
            assert torch.equal(one, other)
    assert torch.equal(amax, amax_compiled)
    assert torch.equal(counts, counts_compiled)


def test_empty_tensors():
    assert [t.shape for t in gelu(torch.empty(0, 16), SCALE, E4M3)] == [(0, 16), (16, 0)]
    assert [t.shape for t in swiglu_backward(torch.empty(0, 8), torch.empty(0, 16), SCALE, E5M2)[:2]] == [
        (0, 16),
        (16, 0),
    ]


def test_mistakes_raise_clear_errors():
    u = torch.zeros(4, 6)
    with pytest.raises(UsageError, match="needs a scale"):
        gelu(u, dtype=E4M3)
    with pytest.raises(UsageError, match="takes no scale"):
        swiglu(u, SCALE)
    with pytest.raises(UsageError, match="expected 'none' or 'tanh'"):
        gelu(u, approximate="fast")
    with pytest.raises(UsageError, match="2 times the columns"):
        swiglu_backward(u, u)
    with pytest.raises(UsageError, match="expected two dimensions"):
        gelu(u[None])
    with pytest.raises(UsageError, match="1 times the columns"):
        gelu_backward(u[:, 1:], u)
