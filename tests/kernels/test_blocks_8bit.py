"""Matrices in 8 bits with a scale for blocks of 4 x 16, and activations that keep their input that way."""

import math

import pytest
import torch
from oracle import KERNEL, assert_same, draw, hardware_rounding, statistics  # noqa: F401

from narrowgauge.kernels import blocks_8bit
from narrowgauge.kernels.activation import GATES, KINDS, activate, activate_and_keep, activate_backward, decode
from narrowgauge.kernels.blocks_8bit import COLUMNS, ROWS, decode_reference, encode_reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALE = torch.tensor(16.0)
SHAPES = [(128, 64), (80, 136), (5, 3)]
CASES = pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((kind, shape) for kind in ("gelu", "swiglu") for shape in SHAPES),
        *((kind, (16, 9)) for kind in KINDS if kind not in ("gelu", "swiglu")),
    ],
    ids=str,
)
pytestmark = pytest.mark.usefixtures("hardware_rounding")


def test_the_error_is_at_most_half_a_step():
    x = draw(62, 300, lowest=-6, highest=6)
    made = encode_reference(x)
    assert made.codes.shape == (5, 62, 64) and made.scales.shape == (5, 16, 4) and made.width == 300
    limit = torch.empty_like(x, dtype=torch.float32)
    for row in range(0, 62, ROWS):
        for column in range(0, 300, COLUMNS):
            block = slice(row, row + ROWS), slice(column, column + COLUMNS)
            limit[block] = x[block].float().abs().max()
    error = (made.decode(torch.float32) - x.float()).abs()
    assert (error <= limit * (0.5 / 128 * 1.02)).all()
    assert (made.decode(torch.float32).sign() == torch.where(x < 0, -1, 1)).all()


def test_normal_values_have_44_decibels():
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    error = encode_reference(x).decode(torch.float32) - x
    decibels = 10 * torch.log10(x.square().mean() / error.square().mean())
    assert 43 < decibels < 45


def test_special_values():
    x = torch.zeros(24, 64)
    x[5, 3] = math.inf
    x[9, 5] = math.nan
    x[12:16] = 1e-44
    x[16:20] = 3.3e38
    x[20, 0] = -1.0
    back = encode_reference(x).decode(torch.float32)
    assert not back[:4].any() and not back[12:16].any()
    for rows in (slice(4, 8), slice(8, 12)):  # a block of 4 x 16
        assert not back[rows, :16].isfinite().any() and not back[rows, 16:].any()
    assert back[16:20].isfinite().all() and (back[16:20] / x[16:20] - 1).abs().max() < 0.01
    assert back[20, 0].item() == pytest.approx(-1.0, rel=0.01) and not back[20:, 16:].any()
    assert back[20, 1:16].min() > 0.003 and back[20:, 1:16].max() < 0.004  # zeros beside it: half a step


def draw_case(kind, shape):
    u = draw(shape[0], shape[1] * (2 if kind in GATES else 1), lowest=-3, highest=3)
    return u, draw(*shape, lowest=-3, highest=3)


@KERNEL
@CASES
def test_forward_keeps_its_input(kind, shape):
    (u, _), last = draw_case(kind, shape), shape[1] == 3
    (amax, counts), (amax_plain, counts_plain) = statistics(), statistics()
    out, kept = activate_and_keep(kind, u, SCALE, E4M3, amax, counts, gate_last=last)
    plain, _ = activate(kind, u, SCALE, E4M3, amax_plain, counts_plain, gate_last=last)
    assert_same(out, plain)
    assert torch.equal(amax, amax_plain) and torch.equal(counts, counts_plain)
    parts = u.chunk(2, 1)[:: -1 if last else 1] if kind in GATES else (u,)
    assert len(kept) == len(parts)
    for blocks, part in zip(kept, parts, strict=True):
        wanted = encode_reference(part)
        assert torch.equal(blocks.scales, wanted.scales)
        assert (blocks.codes.int() - wanted.codes.int()).abs().max() <= 1
        assert (blocks.codes == wanted.codes).float().mean() > 0.99  # the last bit of a reciprocal
    together = torch.cat([blocks.decode(torch.float32) for blocks in kept][:: -1 if last else 1], 1)
    assert torch.equal(decode(kept, last, torch.float32), together)


@KERNEL
@CASES
def test_backward_reads_codes_as_it_reads_their_values(kind, shape):
    (u, grad_output), last, by = draw_case(kind, shape), shape[1] == 3, torch.tensor(9.0)
    _, kept = activate_and_keep(kind, u, SCALE, E4M3, gate_last=last)
    values = decode(kept, last, torch.float32)
    (amax, counts), (amax_plain, counts_plain) = statistics(), statistics()
    out, out_t, again = activate_backward(
        kind, grad_output, kept, SCALE, E5M2, amax, counts, forward_scale=by, gate_last=last
    )
    plain, plain_t, plain_again = activate_backward(
        kind, grad_output, values, SCALE, E5M2, amax_plain, counts_plain, forward_scale=by, gate_last=last
    )
    assert_same(out, plain)
    assert_same(out_t, plain_t)
    assert_same(again, plain_again)
    assert torch.equal(amax, amax_plain) and torch.equal(counts, counts_plain)
    wide, *_ = activate_backward(kind, grad_output, kept, gate_last=last)
    plain, *_ = activate_backward(kind, grad_output, values, gate_last=last)
    assert torch.equal(wide, plain)


@KERNEL
@pytest.mark.parametrize("kind", ["swiglu", "geglu", "gelu"])
def test_small_values_are_not_read_as_zeros(kind):
    """Zeros in a gradient are counted one by one: a SwiGLU's took 0.46 ms on an H200 instead of 0.29."""
    u, grad_output = torch.randn(64, 128), torch.ones(64, 128 // (2 if kind in GATES else 1))
    _, kept = activate_and_keep(kind, u.bfloat16(), SCALE, E4M3)
    grad, *_ = activate_backward(kind, grad_output.bfloat16(), kept)
    assert (decode(kept) != 0).all() and (grad != 0).all()


@KERNEL
@pytest.mark.parametrize("kind", ["relu", "reglu"])
def test_slopes_of_a_relu_are_exact(kind):
    u = torch.randn(64, 128).bfloat16()
    _, kept = activate_and_keep(kind, u, SCALE, E4M3)
    gate = u[:, :64] if kind == "reglu" else u
    grad, *_ = activate_backward(kind, torch.ones_like(gate), kept)
    assert torch.equal(grad[:, : gate.shape[1]] != 0, gate > 0)


@KERNEL
def test_a_value_that_is_not_finite_reaches_the_gradient():
    u = torch.ones(16, 64, dtype=torch.bfloat16)
    u[3, 7] = math.nan
    u[5, 1] = math.inf
    _, kept = activate_and_keep("gelu", u, SCALE, E4M3)
    grad, *_ = activate_backward("gelu", torch.ones_like(u), kept)
    bad = ~grad.isfinite()
    assert bad[3, 7] and bad[5, 1] and bad.nonzero().amax(0).tolist() == [7, 15]  # their blocks, and no others


def test_codes_take_half_the_memory():
    kept = blocks_8bit.allocate(torch.empty(1024, 4096))
    assert kept.codes.nbytes + kept.scales.nbytes == 1024 * 4096 * (1 + 2 / 64)
    assert decode_reference(torch.full_like(kept.codes, 128), torch.ones_like(kept.scales), 4096).unique() == 0.5
