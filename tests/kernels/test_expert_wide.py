"""The passes of experts in BF16 beside their references, with empty slots, ragged widths and every activation."""

import math

import pytest
import torch

pytest.importorskip("triton")

from narrowgauge.kernels.experts import wide
from narrowgauge.kernels.experts.slots import assign_slots
from narrowgauge.nn.experts.find import GATED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
CASES = [(5, 3, 2, 2, 64), (20, 2, 1, 1, 1100), (1, 1, 1, None, 8)]
"""Tokens, experts, experts of each token, experts that have tokens, columns. The interpreter takes 10 ms for a slot."""


def make_slots(tokens, experts, choices, alive):
    generator = torch.Generator().manual_seed(tokens)
    index = torch.rand(tokens, alive or experts, generator=generator).topk(choices).indices
    return assign_slots(index.to(DEVICE), experts)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16).to(DEVICE)


@pytest.mark.parametrize(("tokens", "experts", "choices", "alive", "width"), CASES)
def test_gather(interpreter, tokens, experts, choices, alive, width):
    slots = make_slots(tokens, experts, choices, alive)
    x = draw(tokens, 2 * width)[:, :width]  # rows that are not adjacent
    made = wide.gather(x, slots)
    assert torch.equal(made, wide.gather_reference(x, slots.pairs, slots.choices))
    assert torch.equal(made[slots.of_pairs.long()], x[:, None].expand(-1, choices, -1))
    assert not made[slots.pairs < 0].any()


@pytest.mark.parametrize(("kind", "case"), [*((kind, CASES[2]) for kind in GATED), *(("swiglu", c) for c in CASES[:2])])
def test_activation(interpreter, kind, case):
    *sizes, width = case
    tokens, _, choices, _ = sizes
    slots = make_slots(*sizes)
    empty = (slots.pairs < 0)[:, None]
    u, grad = (draw(slots.size, n, seed=n).masked_fill(empty, math.nan) for n in (2 * width, width))
    weights = torch.rand(tokens, choices, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    made = wide.activate_wide(kind, u, weights, slots)
    expected = wide.activate_wide_reference(kind, u, weights, slots.pairs)
    torch.testing.assert_close(made, expected, rtol=2**-7, atol=1e-5)
    found = wide.activate_wide_backward(kind, grad, u, weights, slots)
    of_u, again, dots = wide.activate_wide_backward_reference(kind, grad, u, weights, slots.pairs)
    for one, other in zip(found, (of_u, again, dots[slots.of_pairs.long()]), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-4 if one.dtype is BF16 else 1e-3)
        assert not one.isnan().any()
    assert torch.equal(found[1], made), "backward computes what forward did"
    assert not found[0][slots.pairs < 0].any()


def test_the_gradient_is_that_of_autograd():
    slots = make_slots(20, 4, 2, 3)
    u = torch.randn(slots.size, 32, dtype=torch.float64, device=DEVICE).requires_grad_()
    weights = torch.rand(20, 2, dtype=torch.float64, device=DEVICE).requires_grad_()
    gate, up = u.chunk(2, 1)
    factors = torch.where(slots.pairs >= 0, weights.reshape(-1)[slots.pairs.clamp(min=0).long()], 0.0)
    value = torch.nn.functional.silu(gate) * up * factors[:, None]
    grad = torch.randn_like(value)
    expected = torch.autograd.grad((value * grad).sum(), (u, weights))
    found = wide.activate_wide_backward_reference(
        "swiglu", grad.float(), u.detach().float(), weights.float(), slots.pairs
    )
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[2][slots.of_pairs.long()].double(), expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
def test_products_have_the_matrix_of_each_expert(transposed):
    slots = make_slots(60, 5, 2, 4)
    a, stack = draw(slots.size, 16), draw(5, 16, 24, seed=1)
    b = stack.transpose(1, 2).contiguous() if transposed else stack
    made = wide.multiply_wide(a, b, slots, transposed)
    for expert in range(5):
        first, last = slots.starts[expert], slots.starts[expert + 1]
        expected = a[first:last].float() @ stack[expert].float()
        torch.testing.assert_close(made[first:last].float(), expected, rtol=2**-7, atol=1e-3)
    sums = wide.multiply_slots_wide(a, made, slots)
    assert sums.shape == (5, 16, 24) and not sums[4].any()
    first, last = slots.starts[1], slots.starts[2]
    expected = a[first:last].float().t() @ made[first:last].float()
    torch.testing.assert_close(sums[1].float(), expected, rtol=2**-7, atol=1e-2)
