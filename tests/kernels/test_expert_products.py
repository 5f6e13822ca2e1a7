"""Slots of experts, and products of slots with the matrices of their experts."""

import pytest
import torch

from narrowgauge.kernels.experts import products
from narrowgauge.kernels.experts.slots import TILE, assign_reference, assign_slots, count_tiles

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def route(tokens, experts, choices, seed=0, alive=None):
    """Choose different experts for each token, of the first ``alive`` ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, alive or experts, generator=generator).topk(choices).indices


def cast(x, dtype=E4M3):
    scale = torch.tensor(448.0 if dtype is E4M3 else 57344.0) / x.abs().max()
    return (x * scale).to(dtype), scale.reciprocal()


@pytest.mark.parametrize(
    ("tokens", "experts", "choices"),
    [(1, 8, 1), (300, 4, 2), (77, 16, 8), (1000, 3, 1), (0, 4, 2), (2500, 300, 4), (40, 1, 1)],
)
def test_every_pair_has_one_slot_among_those_of_its_expert(tokens, experts, choices):
    index = route(tokens, experts, choices)
    slots = assign_slots(index, experts)
    assert slots.size == count_tiles(tokens * choices, experts) * TILE
    for made, expected in zip(slots, assign_reference(index, experts), strict=True):
        assert torch.equal(made, expected) and made.dtype is torch.int32
    held = slots.pairs[slots.pairs >= 0]
    assert sorted(held.tolist()) == list(range(tokens * choices))
    assert torch.equal(slots.pairs[slots.of_pairs.flatten().long()].long(), torch.arange(tokens * choices))
    owners = slots.experts[slots.of_pairs.long() // TILE]
    assert torch.equal(owners.long(), index)
    counts = index.flatten().bincount(minlength=experts)
    assert torch.equal(slots.starts.diff().long(), (counts + TILE - 1) // TILE * TILE)
    used = int(slots.starts[-1])
    assert (slots.experts[: used // TILE] >= 0).all() and (slots.experts[used // TILE :] == -1).all()


def test_slots_suffice_for_the_most_scattered_choice():
    index = torch.cat([torch.arange(8), torch.zeros(2 * TILE - 1, dtype=torch.int64)])[:, None]
    slots = assign_slots(index, 8)
    assert int(slots.starts[-1]) <= slots.size == count_tiles(len(index), 8) * TILE


@pytest.mark.parametrize(("width", "depth"), [(128, 256), (384, 128), (272, 128)])
@pytest.mark.parametrize("alive", [5, 2])
def test_multiply_equals_its_reference(width, depth, alive):
    experts = 5
    slots = assign_slots(route(200, experts, 2, alive=alive), experts)
    torch.manual_seed(1)
    a, inv_a = cast(torch.randn(slots.size, depth) * (slots.pairs >= 0)[:, None], E5M2)
    stack = torch.randn(experts, width, depth)
    rows, inv_b = cast(stack.flatten(0, 1))
    columns = rows.view(experts, width, depth).float().permute(2, 0, 1).reshape(depth, -1).contiguous().to(E4M3)
    made = products.multiply(a, rows, slots, inv_a, inv_b, width)
    expected = products.multiply_reference(a, rows, slots.experts, inv_a, inv_b, width, False)
    used = slice(0, int(slots.starts[-1]))  # what is behind is not computed
    torch.testing.assert_close(made[used], expected[used], rtol=1e-2, atol=1e-3)
    exact = torch.zeros(slots.size, width)
    for expert in range(experts):
        part = slice(int(slots.starts[expert]), int(slots.starts[expert + 1]))
        exact[part] = (a[part].float() * inv_a) @ (rows.view(experts, width, depth)[expert].float() * inv_b).t()
    torch.testing.assert_close(made[used].float(), exact[used], rtol=1e-2, atol=1e-2)
    if width % products.ALIGNMENT == 0:
        b, inv = cast(torch.randn(slots.size, width) * (slots.pairs >= 0)[:, None], E5M2)
        made = products.multiply(b, columns, slots, inv, inv_b, depth, columns=True)
        expected = products.multiply_reference(b, columns, slots.experts, inv, inv_b, depth, True)
        torch.testing.assert_close(made[used], expected[used], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("height", "width"), [(128, 256), (272, 144)])
def test_multiply_slots_equals_its_reference(dtype, height, width):
    experts = 4
    slots = assign_slots(route(300, experts, 2, alive=3), experts)
    torch.manual_seed(2)
    empty = slots.pairs < 0
    a, inv_a = cast(torch.randn(height, slots.size).masked_fill(empty, 0.0), E5M2)
    b, inv_b = cast(torch.randn(width, slots.size).masked_fill(empty, 0.0))
    made = products.multiply_slots(a, b, slots.starts, inv_a, inv_b, dtype)
    expected = products.multiply_slots_reference(a, b, slots.starts, inv_a, inv_b, dtype)
    torch.testing.assert_close(made, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-3)
    assert made.dtype is dtype and not made[3].any() and made[0].any()
