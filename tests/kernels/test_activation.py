"""Activations: references match autograd in FP64, and kernels match the references."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracle import KERNEL, assert_same, assert_transposed, draw, hardware_rounding, statistics  # noqa: F401
from torch._subclasses import FakeTensorMode

from narrowgauge.errors import UsageError
from narrowgauge.kernels import activation, use_triton
from narrowgauge.kernels.activation import (
    GATES,
    KINDS,
    activate,
    activate_backward,
)
from narrowgauge.kernels.activation_reference import activate_backward_reference, activate_reference
from narrowgauge.kernels.fp8_formats import FP8_MAX
from narrowgauge.kernels.fp8_tile import quantize_reference
from narrowgauge.nn.blocks.activations import ACTIVATIONS, GATED, compute_activation

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
VARIANTS = pytest.mark.parametrize("kind", ["gelu", "gelu-tanh"])
# Two whole tiles; one incomplete; two by two, incomplete at both ends; lengths not divisible by 16; one column.
SHAPES = [(128, 64), (48, 40), (80, 72), (66, 2), (5, 3), (16, 1)]
# Tiles are the same for all functions, so most need fewer shapes.
CASES = pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((kind, shape) for kind in ("gelu", "swiglu") for shape in SHAPES),
        *((kind, (16, 9)) for kind in KINDS if kind not in ("gelu", "swiglu")),
    ],
    ids=str,
)
SCALE = torch.tensor(16.0)
pytestmark = pytest.mark.usefixtures("hardware_rounding")


def inputs(*shape):
    return draw(*shape, lowest=-3, highest=3)


def draw_case(kind, shape):
    """Return an activation's input, which may hold exact zeros, and the gradient of its output."""
    u = inputs(shape[0], shape[1] * (2 if kind in GATES else 1))
    return u, inputs(*shape)


def by_autograd(function, grad_output, *leaves):
    leaves = [leaf.double().requires_grad_() for leaf in leaves]
    output = function(*leaves)
    return output.detach(), torch.autograd.grad(output, leaves, grad_output.double())


def test_every_activation_of_a_block_has_a_kernel():
    assert set(KINDS) == {*ACTIVATIONS, *GATED} and GATES == GATED


@pytest.mark.parametrize("gate_last", [False, True], ids=["", "gate last"])
@pytest.mark.parametrize("kind", KINDS)
def test_references_match_torch_in_fp64(kind, gate_last):
    u, grad_output = torch.linspace(-12, 12, 8192).view(64, 128), inputs(64, 64 if kind in GATES else 128)
    value, (grad,) = by_autograd(lambda x: compute_activation(kind, x, gate_last), grad_output, u)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        forward = activate_reference(kind, u.to(dtype), gate_last)
        backward = activate_backward_reference(kind, grad_output.to(dtype), u.to(dtype), gate_last)
        torch.testing.assert_close(forward.double(), value, rtol=tolerance, atol=10 * tolerance)
        torch.testing.assert_close(backward.double(), grad, rtol=10 * tolerance, atol=100 * tolerance)


def cases(kind, shape):
    """Return forward and backward as (call, expected value in FP32, format)."""
    (u, grad_output), last = draw_case(kind, shape), kind in GATES and shape[1] in (3, 9)
    yield lambda *a, **k: activate(kind, u, *a, gate_last=last, **k), activate_reference(kind, u, last), E4M3
    yield (
        lambda *a, **k: activate_backward(kind, grad_output, u, *a, gate_last=last, **k)[:2],
        activate_backward_reference(kind, grad_output, u, last),
        E5M2,
    )


@KERNEL
@CASES
def test_kernels_match_the_references(kind, shape, monkeypatch):
    monkeypatch.setattr(activation, "TILE", activation.PAIR_TILE)  # smaller: two whole tiles in 128 rows
    for call, value, dtype in cases(kind, shape):
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
def test_backward_recomputes_the_forward_output(kind, shape):
    """The recomputed output has the bits of forward's, and the gradient does not change."""
    (u, grad_output), by = draw_case(kind, shape), torch.tensor(9.0)
    _, wanted = activate(kind, u, by, E4M3)
    plain, plain_t, none = activate_backward(kind, grad_output, u, SCALE, E5M2)
    assert none is None
    out, out_t, again = activate_backward(kind, grad_output, u, SCALE, E5M2, forward_scale=by)
    assert_same(again, wanted)
    assert_same(out, plain)
    assert_same(out_t, plain_t)


def test_the_polynomial_for_the_normal_integral():
    """FP32 input and output show its error, which BF16 and FP8 hide: 6e-6 of the value down to -6."""
    u = torch.linspace(-14, 14, 8192).view(64, 128)
    exact, (slope,) = by_autograd(F.gelu, torch.ones_like(u), u)
    value, _ = activate("gelu", u, dtype=torch.float32)
    near = u > -6
    torch.testing.assert_close(value.double()[near], exact[near], rtol=1e-5, atol=0)
    assert (value.double() - exact)[~near].abs().max() < 1e-8
    grad, *_ = activate_backward("gelu", torch.ones_like(u), u, dtype=torch.float32)
    torch.testing.assert_close(grad.double(), slope, rtol=1e-5, atol=2e-6)


@KERNEL
@VARIANTS
def test_extremes_give_no_nan(kind):
    u = torch.tensor([[-3e38, -1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 1e4, 3e38, math.inf]])
    value, _ = activate(kind, u, dtype=torch.float32)
    assert torch.equal(value, torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 20.0, 1e4, 3e38, math.inf]]))


@KERNEL
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in GATES])
def test_nan_stays_nan(kind):
    amax = torch.zeros(1)
    out, _ = activate(kind, torch.tensor([[1.0, math.nan]]), SCALE, E4M3, amax)
    assert torch.isnan(out.float()).tolist() == [[False, True]]
    assert torch.isnan(amax).all()


@KERNEL
def test_any_strides():
    wide = inputs(40, 96)
    for u in (wide[:, 8:56], wide.t(), wide[:1].expand(40, 96)):
        assert_same(activate("gelu", u, SCALE, E4M3)[0], activate("gelu", u.contiguous(), SCALE, E4M3)[0])
        for kind, grad_output in (("gelu", u), ("swiglu", u[:, : u.shape[1] // 2])):
            assert_same(
                activate_backward(kind, grad_output, u, SCALE, E5M2)[0],
                activate_backward(kind, grad_output.clone(), u.clone(), SCALE, E5M2)[0],
            )


def run_all_ops(u, grad_output, gate_up, amax, counts):
    scale = torch.ones(())
    pairs = (
        activate("gelu", u, scale, E4M3, amax, counts),
        activate("gelu-tanh", u),
        activate_backward("relu", grad_output, u, scale, E5M2, amax, counts)[:2],
        activate_backward("gelu", grad_output, u, scale, E5M2, transposed=False)[:2],
        activate("swiglu", gate_up, scale, E4M3, amax, None),
        activate_backward("geglu", grad_output, gate_up, scale, E5M2, None, counts, forward_scale=scale),
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
    assert [t.shape for t in activate("gelu", torch.empty(0, 16), SCALE, E4M3)] == [(0, 16), (16, 0)]
    assert [t.shape for t in activate_backward("swiglu", torch.empty(0, 8), torch.empty(0, 16), SCALE, E5M2)[:2]] == [
        (0, 16),
        (16, 0),
    ]


def test_mistakes_raise_clear_errors():
    u = torch.zeros(4, 6)
    with pytest.raises(UsageError, match="needs a scale"):
        activate("gelu", u, dtype=E4M3)
    with pytest.raises(UsageError, match="takes no scale"):
        activate("swiglu", u, SCALE)
    with pytest.raises(UsageError, match="'mish' is unknown; expected one of gelu, gelu-tanh"):
        activate("mish", u)
    with pytest.raises(UsageError, match="the same shape, for gate and up each"):
        activate_backward("swiglu", u, u)
    with pytest.raises(UsageError, match="expected two dimensions"):
        activate("gelu", u[None])
    with pytest.raises(UsageError, match="and the same shape"):
        activate_backward("gelu", u[:, 1:], u)
