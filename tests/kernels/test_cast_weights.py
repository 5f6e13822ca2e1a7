"""Casts of weights: scaled by their own amax, or by a delayed scale that is recomputed if it does not fit."""

import math

import pytest
import torch
from oracle import KERNEL, assert_same, assert_transposed, hardware_rounding  # noqa: F401
from torch._subclasses import FakeTensorMode

from narrowgauge.kernels.cast_weights import (
    cast_weight,
    cast_weight_delayed,
    cast_weight_delayed_reference,
    cast_weight_reference,
    choose_weight_scale,
    recast_weight,
)
from narrowgauge.kernels.fp8_formats import FP8_MAX

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
pytestmark = pytest.mark.usefixtures("hardware_rounding")


def draw(*shapes, factor=1.0):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).clamp(-3, 3) * factor for shape in shapes]


def make_statistics():
    """Return amax, counts and pending with the initial values of a site."""
    return torch.zeros(()), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)


ONE, TWO, ODD = [(48, 24)], [(48, 32), (32, 32)], [(7, 5)]


def name_case(value):
    names = {E4M3: "e4m3", E5M2: "e5m2"}
    return "+".join(map(str, value)) if isinstance(value, list) else names.get(value, str(value))


# Factors choose the scale, shapes the tiles: every value with every other of another parameter, not all three.
@KERNEL
@pytest.mark.parametrize(
    ("factor", "shapes", "dtype"),
    [
        *((factor, TWO, E4M3) for factor in (1.0, 1e-6, 1e6, 0.0, 1e-42, math.inf, math.nan)),
        *((factor, ODD, E5M2) for factor in (1.0, 1e-6, 1e6, 0.0, 1e-42, math.inf, math.nan)),
        (1.0, ONE, E4M3), (1.0, ODD, E4M3), (1e6, ONE, E5M2), (1e-6, TWO, E5M2),
    ],
    ids=name_case,
)  # fmt: skip
def test_weights_are_scaled_by_their_own_amax(shapes, dtype, factor):
    weights = draw(*shapes, factor=factor)
    lp, lp_t, inv_scale, seen = cast_weight(weights, dtype, True, 1)
    reference, _, inv_scale_reference, largest = cast_weight_reference(weights, dtype, True, 1)
    assert_same(lp, reference)
    assert_transposed(lp_t, lp)
    torch.testing.assert_close(inv_scale, inv_scale_reference, rtol=2e-7, atol=0)  # a reciprocal may be off by a bit
    torch.testing.assert_close(seen, largest, equal_nan=True)
    assert inv_scale.shape == () and cast_weight(weights, dtype, False)[1] is None


@KERNEL
@pytest.mark.parametrize(
    ("factor", "margin", "shapes"),
    [
        *((factor, 0, TWO) for factor in (1.0, 1.02, 0.3, 64.0, 1 / 64, 1e6, 0.0, math.inf, math.nan)),
        *((factor, 2, ODD) for factor in (1.0, 1.02, 0.3, 64.0, 1 / 64, 1e6, 0.0, math.inf, math.nan)),
        (1.0, 0, ONE), (1.0, 2, TWO), (64.0, 0, ODD), (64.0, 2, ONE),
    ],
    ids=name_case,
)  # fmt: skip
def test_a_delayed_scale_is_used_if_it_fits_and_else_recomputed(shapes, factor, margin):
    scale = FP8_MAX[E4M3] / torch.tensor(3.0) / 2**margin
    weights = draw(*shapes, factor=factor)
    (amax, counts, pending), (amax_r, counts_r, pending_r) = make_statistics(), make_statistics()
    lp, lp_t, inverse = cast_weight_delayed(weights, scale, amax, counts, pending, E4M3, True, margin)
    reference, _, inverse_r = cast_weight_delayed_reference(
        weights, scale, amax_r, counts_r, pending_r, E4M3, True, margin
    )
    assert_same(lp, reference)
    assert_transposed(lp_t, lp)
    torch.testing.assert_close(inverse, inverse_r, rtol=2e-7, atol=0)
    torch.testing.assert_close(amax, amax_r, equal_nan=True)
    assert torch.equal(counts, counts_r) and not pending.any()
    fits = factor in (1.0, 1.02, 0.3, 0.0) or not math.isfinite(factor)
    assert bool((choose_weight_scale(scale, amax, E4M3, margin) == scale).item()) == fits
    if math.isfinite(factor):
        assert counts[0] == 0, "nothing saturates, whatever was written into the weights"
        wide, whole = lp.float() * inverse, torch.cat(weights)
        assert (wide - whole).abs().max() <= whole.abs().max() / 16
    again = recast_weight(weights, scale, amax, E4M3, True, margin)
    for one, other in zip(again, (lp, lp_t, inverse), strict=True):
        assert_same(one, other) if one.dtype is E4M3 else torch.testing.assert_close(one, other)
    assert torch.equal(counts, counts_r)


def test_empty_weights():
    assert cast_weight([torch.empty(0, 16)], E4M3)[2].item() == 1.0
    amax, counts, pending = make_statistics()
    lp, lp_t, inverse = cast_weight_delayed([torch.empty(0, 16)], torch.tensor(2.0), amax, counts, pending, E4M3)
    assert (lp.shape, lp_t.shape, inverse.item()) == ((0, 16), (16, 0), 0.5)


def test_fake_tensors_see_shapes_and_formats():
    def run_all_ops(weights, scale, amax, counts, pending):
        return (
            *cast_weight(weights, E4M3),
            *cast_weight_delayed(weights, scale, amax, counts, pending, E4M3),
            *recast_weight(weights, scale, amax, E4M3),
        )

    weights = draw((32, 16), (16, 16))
    real = run_all_ops(weights, torch.ones(()), *make_statistics())
    with FakeTensorMode() as mode:
        fake = run_all_ops([mode.from_tensor(weight) for weight in weights], torch.ones(()), *make_statistics())
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
