"""Rotary embedding and head norms: the kernel matches its reference, and the reference autograd in FP64."""

import pytest
import torch

from narrowgauge.kernels import rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Queries, keys, head size, rotated columns, norms (of each head, or over all), pairs: grouped, one key head, a part
# rotated, no powers of two.
LAYOUTS = [
    (4, 2, 16, 16, ""), (3, 1, 24, 8, "heads"), (2, 2, 16, 16, "heads"), (5, 5, 12, 12, ""),
    (4, 2, 16, 16, "all"), (3, 1, 24, 8, "all"), (5, 5, 12, 12, "all"),
    (4, 2, 16, 16, "", True), (3, 1, 24, 8, "heads", True), (5, 5, 12, 12, "all", True),
]  # fmt: skip


def make(queries, keys, size, turned, norms, pairs=False, dtype=torch.float32, batch=2, length=5):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    qkv = draw(batch, length, (queries + 2 * keys) * size)
    turns = torch.rand(length, turned // 2, generator=generator).double() * 6
    turns = turns.repeat_interleave(2, -1) if pairs else torch.cat([turns, turns], -1)
    turns = turns[None].to(DEVICE)
    widths = (size, size) if norms == "heads" else (queries * size, keys * size)
    weights = tuple(1 + draw(width) / 4 for width in widths) if norms else (None, None)
    angles = (turns.cos().to(dtype if dtype is torch.float64 else torch.float32), turns.sin())
    grads = draw(batch, length, queries, size).transpose(1, 2), draw(batch, keys, length, size)
    return qkv, angles[0], angles[1].to(angles[0].dtype), rotary.Heads(queries, keys, size, pairs), weights, grads


def rotate_plainly(qkv, cos, sin, heads, weights, eps):
    """Compute the formulas of the models: norm, then x cos + [-right, left] sin, or a product of complex numbers."""
    batch, length, _ = qkv.shape
    rotated = []
    start = 0
    for count, weight in zip((heads.queries, heads.keys), weights, strict=True):
        x = qkv[..., start : start + count * heads.size].view(batch, length, count, heads.size).transpose(1, 2)
        start += count * heads.size
        if weight is not None and len(weight) > heads.size:
            of_each = weight.view(count, 1, heads.size)
            x = x * torch.rsqrt(x.square().mean((1, 3), keepdim=True) + eps) * of_each
        elif weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        part, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        if heads.pairs:  # each pair is a complex number, and its rotation a product
            turn = torch.complex(cos, sin)[:, None, :, ::2]
            product = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turn
            rotated.append(torch.cat([torch.view_as_real(product).flatten(-2), rest], -1))
            continue
        left, right = part.chunk(2, -1)
        rotated.append(torch.cat([part * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None], rest], -1))
    return rotated


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_reference_matches_autograd(layout):
    qkv, cos, sin, heads, weights, grads = make(*layout, dtype=torch.float64)
    leaves = [qkv.requires_grad_(), *(w.requires_grad_() for w in weights if w is not None)]
    q, k = rotate_plainly(qkv, cos, sin, heads, weights, 1e-6)
    expected = torch.autograd.grad((q, k), leaves, grads)
    with torch.no_grad():
        out, rstd = rotary.rotate_reference(qkv, cos, sin, *heads, *weights, 1e-6)
        found, of_q, of_k = rotary.rotate_backward_reference(*grads, qkv, cos, sin, *heads, *weights, rstd)
    width = (heads.queries + heads.keys) * heads.size
    both = torch.cat([q, k], 1).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out, both)
    torch.testing.assert_close(found, expected[0][..., :width])
    if weights[0] is not None:
        torch.testing.assert_close(of_q, expected[1])
        torch.testing.assert_close(of_k, expected[2])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_matches_the_reference(layout, dtype):
    qkv, cos, sin, heads, weights, grads = make(*layout, dtype=dtype)
    out, rstd = rotary.rotate(qkv, cos, sin, heads, *weights, 1e-6)
    expected, expected_rstd = rotary.rotate_reference(qkv, cos, sin, *heads, *weights, 1e-6)
    step = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    torch.testing.assert_close(out, expected, **step)
    torch.testing.assert_close(rstd, expected_rstd, rtol=1e-5, atol=1e-6)
    found = rotary.rotate_backward(*grads, qkv, cos, sin, heads, *weights, rstd if weights[0] is not None else None)
    wanted = rotary.rotate_backward_reference(*grads, qkv, cos, sin, *heads, *weights, expected_rstd)
    torch.testing.assert_close(found[0], wanted[0], **step)
    if weights[0] is None:
        assert found[1] is None and found[2] is None
    else:
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[2], wanted[2], rtol=1e-4, atol=1e-4)
        assert found[1].untyped_storage().data_ptr() != found[2].untyped_storage().data_ptr()  # results of an op


@pytest.mark.parametrize("pairs", [False, True])
def test_angles_of_each_row_of_a_batch(pairs):
    """Packed or padded batches have positions of their own."""
    qkv, cos, sin, heads, _, grads = make(2, 1, 16, 16, "", pairs)
    cos, sin = (torch.cat([angle, angle.flip(1)]) for angle in (cos, sin))
    out, _ = rotary.rotate(qkv, cos, sin, heads)
    for row in range(2):
        alone, _ = rotary.rotate(qkv[row : row + 1], cos[row : row + 1], sin[row : row + 1], heads)
        torch.testing.assert_close(out[row : row + 1], alone)
    found, *_ = rotary.rotate_backward(*grads, qkv, cos, sin, heads)
    wanted, *_ = rotary.rotate_backward_reference(*grads, qkv, cos, sin, *heads, None, None, None)
    torch.testing.assert_close(found, wanted)


def test_a_slice_of_a_wider_row_is_read_by_its_stride():
    qkv, cos, sin, heads, *_ = make(2, 1, 16, 16, "")
    wide = torch.cat([qkv, torch.full_like(qkv, torch.nan)], -1)[..., : qkv.shape[-1]]
    assert torch.equal(rotary.rotate(wide, cos, sin, heads)[0], rotary.rotate(qkv, cos, sin, heads)[0])


@pytest.mark.parametrize("pairs", [False, True])
def test_in_place(pairs):
    qkv, cos, sin, heads, *_ = make(3, 1, 24, 8, "", pairs)
    wanted, _ = rotary.rotate(qkv, cos, sin, heads)
    values = qkv[..., 4 * 24 :].clone()
    made, _ = rotary.rotate(qkv, cos, sin, heads, in_place=True)
    assert made is qkv and torch.equal(qkv[..., : 4 * 24], wanted) and torch.equal(qkv[..., 4 * 24 :], values)
