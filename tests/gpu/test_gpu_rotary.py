"""Rotary embedding on a GPU: the kernel matches its reference, for halves of a head and for neighbouring columns."""

import pytest
import torch

from narrowgauge.kernels.rotary import Heads, rotate, rotate_backward, rotate_backward_reference, rotate_reference

STEP = {"rtol": 2**-7, "atol": 2**-7}
"""BF16 results may differ by a rounding."""


def draw(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("norms", [None, "heads", "all"])
@pytest.mark.parametrize(
    ("queries", "keys", "size", "turned"), [(32, 8, 64, 64), (8, 8, 128, 128), (12, 3, 80, 32), (5, 1, 96, 96)]
)
def test_the_kernel_matches_its_reference(queries, keys, size, turned, norms, pairs):
    heads, batch, length = Heads(queries, keys, size, pairs), 2, 257
    qkv = draw(batch, length, (queries + 2 * keys) * size)
    angles = torch.rand(batch, length, turned, device="cuda") * 6
    widths = {None: (), "heads": (size, size), "all": (queries * size, keys * size)}[norms]
    weights = [1 + 0.1 * draw(width, seed=2).float() for width in widths] or [None, None]
    out, rstd = rotate(qkv, angles.cos(), angles.sin(), heads, *weights, 1e-6)
    wanted, expected = rotate_reference(qkv, angles.cos(), angles.sin(), *heads, *weights, 1e-6)
    torch.testing.assert_close(out, wanted, **STEP)
    torch.testing.assert_close(rstd, expected, rtol=1e-4, atol=1e-5)
    grads = draw(batch, queries, length, size, seed=3), draw(batch, length, keys, size, seed=4).transpose(1, 2)
    inputs = *grads, qkv, angles.cos(), angles.sin()
    found = rotate_backward(*inputs, heads, *weights, rstd if norms else None)
    right = rotate_backward_reference(*inputs, *heads, *weights, expected)
    torch.testing.assert_close(found[0], right[0], rtol=2**-6, atol=2**-6)
    for one, other in zip(found[1:], right[1:], strict=True):
        if norms:
            assert (one - other).norm() < 1e-2 * other.norm()


@pytest.mark.parametrize("size", [64, 80, 128])
def test_neighbours_in_place(size):
    heads, qkv = Heads(8, 2, size, True), draw(2, 512, 12 * size)
    angles = torch.rand(1, 512, size, device="cuda") * 6
    wanted, _ = rotate(qkv, angles.cos(), angles.sin(), heads)
    got, _ = rotate(qkv, angles.cos(), angles.sin(), heads, in_place=True)
    assert got is qkv and torch.equal(got[..., : 10 * size], wanted)
