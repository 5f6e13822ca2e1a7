"""The kernels' casts of weights match their references, in the shapes of real models."""

import pytest
import torch

from narrowgauge.kernels.cast_weights import (
    cast_weight,
    cast_weight_delayed,
    cast_weight_delayed_reference,
    cast_weight_reference,
    recast_weight,
)
from narrowgauge.kernels.fp8_formats import FP8_MAX

E4M3 = torch.float8_e4m3fn
SHAPES = pytest.mark.parametrize(
    "shapes", [[(2304, 768)], [(50304, 768)], [(100, 36)], [(5504, 2048), (5504, 2048)], [(48, 16), (32, 16)]]
)


def bits(x):
    return x.view(torch.uint8)


def numbers():
    return torch.zeros((), device="cuda"), *torch.zeros(2, 2, dtype=torch.int64, device="cuda").unbind()


@SHAPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 1e-6, 0.0, float("inf"), float("nan")])
def test_weights_with_their_own_amax(shapes, dtype, factor):
    weights = [(torch.randn(shape, device="cuda") * factor).to(dtype) for shape in shapes]
    lp, lp_t, inverse, _ = cast_weight(weights, E4M3)
    reference, reference_t, inverse_r, _ = cast_weight_reference(weights, E4M3)
    assert torch.equal(bits(lp), bits(reference)) and torch.equal(bits(lp_t), bits(reference_t))
    assert torch.equal(inverse, inverse_r)


@SHAPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 40.0, 1 / 40, 0.0, float("inf"), float("nan")])
def test_weights_with_a_delayed_scale(shapes, dtype, factor):
    weights = [(torch.randn(shape, device="cuda").clamp(-4, 4) * factor).to(dtype) for shape in shapes]
    scale = torch.tensor(FP8_MAX[E4M3] / 4, device="cuda")
    (amax, counts, pending), (amax_r, counts_r, pending_r) = numbers(), numbers()
    made = cast_weight_delayed(weights, scale, amax, counts, pending, E4M3)
    wanted = cast_weight_delayed_reference(weights, scale, amax_r, counts_r, pending_r, E4M3)
    for one, other in zip(made[:2], wanted[:2], strict=True):
        assert torch.equal(bits(one), bits(other))
    assert torch.equal(made[2], wanted[2])
    torch.testing.assert_close(amax, amax_r, equal_nan=True)
    assert torch.equal(counts, counts_r) and not pending.any()
    for one, other in zip(recast_weight(weights, scale, amax, E4M3)[:2], made[:2], strict=True):
        assert torch.equal(bits(one), bits(other))


def test_a_strided_weight_is_cast_like_a_contiguous_one():
    weight = torch.randn(256, 512, device="cuda").t()
    for one, other in zip(cast_weight([weight], E4M3)[:2], cast_weight([weight.contiguous()], E4M3)[:2], strict=True):
        assert torch.equal(bits(one), bits(other))


def test_calls_do_not_synchronize_and_can_be_captured():
    weight, scale = torch.randn(768, 256, device="cuda"), torch.tensor(100.0, device="cuda")
    site = numbers()

    def calls():
        cast_weight([weight], E4M3)
        return cast_weight_delayed([weight], scale, *site, E4M3)

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lp, lp_t, inverse = calls()
    for factor in (1.0, 300.0, 1.0):
        weight.copy_(torch.randn(768, 256, device="cuda") * factor)
        site[0].zero_()
        graph.replay()
        wide = lp.float() * inverse
        assert (wide - weight).abs().max() <= weight.abs().max() / 16
        assert torch.equal(bits(lp_t), bits(lp).t())
