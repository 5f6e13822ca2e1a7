"""Cross-entropy of 16-bit logits [N, V]: the loss, and its gradient in BF16, or in FP8 in both layouts.

    lse[n]  = log sum_v exp(x[n, v])                        loss[n] = lse[n] - x[n, target[n]]
    d[n, v] = exp(x[n, v] - lse[n]) - [v == target[n]]      in [-1, 1]; 0 in ignored rows

``LossForm`` changes this. A multiplier and a soft cap are applied to the logits z that a head computes, and label
smoothing eps spreads a part of the target evenly:

    x       = multiplier z, or cap tanh(multiplier z / cap)
    loss[n] = lse[n] - (1 - eps) x[n, target[n]] - eps / V sum_v x[n, v]
    d[n, v] = (exp(x[n, v] - lse[n]) - (1 - eps) [v == target[n]] - eps / V) (1 - tanh(multiplier z / cap)^2)

So d is still in [-1, 1], and the gradient of z is multiplier d: callers put the multiplier into the factor.

The kernels compute in FP32 and never store FP32 logits. Bytes per logit: the statistics read 2; the gradient reads 2
and writes 2 (BF16, in place on request) or 1 per layout (FP8). Forward and backward with both layouts move 6 bytes,
4.8 ms for GPT-2's 65,536 x 50,304 at an H200's 4.2 TB/s. In BF16 both are one kernel that moves 4, 3.1 ms.

FP8 stores d * UNIT_SCALE. |d| <= 1, so the scale is a constant. 1/tokens and the loss scale go into the inverse scale
of the product that reads d. The choice of format: the target's entry is near -1, and most of a row is tiny (1/V and far
less). E5M2 has the range for both but rounds coarsely, and every layer sees that error, as the gradient of the whole
network starts here. E4M3 rounds half as coarsely but would flush most of the vocabulary, always downwards.

So d is stored in E4M3 and dithered: each number is rounded up or down by an offset of its place. The offsets are spread
evenly over rows and columns (a lattice, Roberts' R2), so that entries of every size are right on average in any sum.
This matters because d cancels: rows add up to zero, and so do, nearly, the entries of a token in equal contexts, once
the model's probabilities are right. Rounding to the nearest leaves errors of one sign there. ``python
bench/logit_gradients.py``: V = 50,304, 4,096 rows, SQNR in dB, and the mean of rows' sums, in % of the sum of |d|, with
its standard error.

                             loss 10.8                   loss 7.2                    loss 3.0
                             input  weight  sum          input  weight  sum          input  weight  sum
    E5M2, nearest             29.7   47.1   -1.644        30.8   30.3   -0.322 (15)   25.0   27.7   -0.275 (35)
    E4M3, nearest             17.6   35.7   +6.600 (3)    28.2   37.1   -1.795 (9)    30.1   32.5   -0.765 (17)
    E4M3, small dithered      60.9   62.6   -0.001        36.0   37.6   -0.119 (9)    31.0   32.5   -0.150 (17)
    E4M3, all dithered        52.7   55.7   +0.001 (1)    32.5   35.8   -0.007 (13)   27.8   31.5   +0.002 (26)

Dithering adds an error to rare tokens in grad_weight that falls with the square root of the number of rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.kernels import can_bypass_op, use_triton
from narrowgauge.kernels.cast import transpose_reference
from narrowgauge.kernels.cross_entropy_kernels import (
    LATTICE,
    grad_logits_fp8_kernel,
    grad_logits_kernel,
    loss_gradient_kernel,
    rescale_kernel,
    statistics_kernel,
)
from narrowgauge.kernels.dry_run import is_dry_run
from narrowgauge.kernels.fp8_formats import FLUSH_THRESHOLD, get_format_name
from narrowgauge.kernels.fp8_tile import tile_grid, tiles_evenly
from narrowgauge.kernels.launch import launch_kernel

IGNORE = -100


class LossForm(NamedTuple):
    """What happens to the logits before their cross-entropy, and to the targets; None is nothing."""

    multiplier: float | None = None
    """Factor of the logits (Cohere, Granite)."""
    cap: float | None = None
    """Limit of the logits after the multiplier: cap * tanh(x / cap) (Gemma 2)."""
    smoothing: float | None = None
    """Share of the target that is spread evenly over all classes."""


PLAIN = LossForm()
UNIT_SCALE: dict[torch.dtype, float] = {torch.float8_e4m3fn: 256.0, torch.float8_e5m2: 32768.0}
"""The scale of FP8 gradients of logits: the largest power of two that keeps [-1, 1] within the format."""

# 63 registers: eight programs per SM with 4 KB in flight each; Little's law needs about 25 KB per SM.
STATISTICS_TILE: dict[str, int] = {"BLOCK": 2048, "num_warps": 4}
# Two programs per SM: their 264 rows of 50,304 logits, 27 MB, are still cached for the second read. More than 32
# registers per thread would leave one program per SM, which idles while it waits.
LOSS_GRADIENT_TILE: dict[str, int] = {"BLOCK": 8192, "num_warps": 32}
GRADIENT_TILE: dict[str, int] = {"BLOCK_N": 16, "BLOCK_V": 512, "num_warps": 8}
# Running tiles in bands, so that their columns are adjacent in [V, N], gained nothing (0.880 ms and 0.876).
LP_TILE: dict[str, int] = {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 8}
RESCALE_TILE: dict[str, int] = {"BLOCK": 4096, "num_warps": 8}


def compute_softmax_stats(
    logits: Tensor, targets: Tensor, ignore_index: int = IGNORE, form: LossForm = PLAIN
) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp and loss of each row, in FP32, in one pass over the logits; an ignored row has loss 0.

    On a GPU a target outside the vocabulary gives a loss of NaN; on the CPU it raises.
    """
    run = _softmax_stats if can_bypass_op(logits, targets) else _softmax_stats_op
    return run(logits, targets, ignore_index, *form)


def compute_grad_logits(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    factor: Tensor,
    ignore_index: int = IGNORE,
    out: Tensor | None = None,
    form: LossForm = PLAIN,
) -> Tensor:
    """Return d * factor in the logits' format; ``out`` may be the logits themselves, which are then overwritten."""
    out = torch.empty_like(logits) if out is None else out
    run = _grad_logits if can_bypass_op(logits, targets, out) else _grad_logits_op
    run(logits, targets, lse, factor, out, ignore_index, *form)
    return out


def compute_loss_and_grad(
    logits: Tensor,
    targets: Tensor,
    factor: Tensor,
    ignore_index: int = IGNORE,
    out: Tensor | None = None,
    form: LossForm = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row and d * factor in one pass; ``out`` works as in ``compute_grad_logits``."""
    out = torch.empty_like(logits) if out is None else out
    run = _loss_and_grad if can_bypass_op(logits, targets, out) else _loss_and_grad_op
    return run(logits, targets, factor, out, ignore_index, *form), out


def compute_grad_logits_fp8(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    ignore_index: int = IGNORE,
    counts: Tensor | None = None,
    transposed: bool = True,
    first_row: int = 0,
    form: LossForm = PLAIN,
    out_t: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return d * UNIT_SCALE[dtype] in FP8, dithered, as [N, V] and, if ``transposed``, as [V, N].

    ``first_row`` is the position of these rows in the batch, so that the result does not depend on the chunk size.
    ``counts`` (int64) gets the number of saturated values (always 0) and of values flushed to zero. ``out_t`` takes the
    transposed result: columns of a wider tensor, which start at a multiple of 16, as both their numbers are.
    """
    run = _grad_logits_fp8 if can_bypass_op(logits, targets) else _grad_logits_fp8_op
    made = transposed and out_t is None
    d, d_t = run(logits, targets, lse, dtype, ignore_index, counts, out_t, made, first_row, *form)
    return d, out_t if out_t is not None else d_t if transposed else None


def rescale_(tensor: Tensor, factor: Tensor) -> Tensor:
    """Compute tensor *= factor in place, in FP32. With a factor of 1 the kernel exits without touching the tensor.

    So a gradient computed before its factor was known (a loss scale, 1/accumulate) costs no pass if the factor is 1.
    """
    launches = use_triton(tensor) and tensor.is_contiguous() and tensor.numel()
    if not (launches and (is_dry_run() or can_bypass_op(tensor, factor))):
        return tensor.copy_(tensor.float() * factor)
    size = tensor.numel()
    events.report_launch("rescale", [tensor], [tensor])
    launch_kernel(rescale_kernel, (-(-size // RESCALE_TILE["BLOCK"]),), tensor, factor, size, **RESCALE_TILE)
    return tensor


def shape_logits(logits: Tensor, form: LossForm = PLAIN) -> Tensor:
    """Return x in FP32."""
    x = logits.float() if form.multiplier is None else logits.float() * form.multiplier
    return x if form.cap is None else form.cap * torch.tanh(x / form.cap)


def softmax_stats_reference(
    logits: Tensor, targets: Tensor, ignore_index: int = IGNORE, form: LossForm = PLAIN
) -> tuple[Tensor, Tensor]:
    x, counted = shape_logits(logits, form), targets != ignore_index
    lse = torch.logsumexp(x, 1)
    picked = x.gather(1, torch.where(counted, targets, 0)[:, None])[:, 0]
    if form.smoothing is not None:
        picked = torch.lerp(picked, x.mean(1), form.smoothing)
    return lse, torch.where(counted, lse - picked, 0.0)


def grad_logits_reference(
    logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int = IGNORE, form: LossForm = PLAIN
) -> Tensor:
    """Return d in FP32."""
    counted, x, smoothing = (targets != ignore_index)[:, None], shape_logits(logits, form), form.smoothing or 0.0
    d = torch.exp(x - lse[:, None])
    d.scatter_add_(1, torch.where(counted, targets[:, None], 0), torch.full_like(lse, smoothing - 1.0)[:, None])
    if smoothing:
        d -= smoothing / d.shape[1]
    if form.cap is not None:
        d *= 1 - (x / form.cap).square()
    return torch.where(counted, d, 0.0)


def dither(values: Tensor, dtype: torch.dtype, first_row: int = 0) -> Tensor:
    """Round values [N, V] up or down so that they are right on average, each with an offset of its place.

    Values below the smallest normal number get an offset of up to half a step and are not rounded yet. Zeros, powers of
    two and what else the format has exactly do not change.
    """
    values = values.float().contiguous()
    rows, columns = (torch.arange(size, device=values.device) for size in values.shape)
    high = ((first_row + rows) * LATTICE[0] & 0xFFFFFFFF) >> 9
    wide = (columns * LATTICE[1] & 0xFFFFFFFF) >> 9
    places = ((high[:, None] + wide[None, :]) & 0x7FFFFF).int()
    info, step = torch.finfo(dtype), 2 * FLUSH_THRESHOLD[dtype]
    cut = 23 + round(math.log2(info.eps))
    normal = ((values.view(torch.int32) + (places >> (23 - cut))) & (-1 << cut)).view(torch.float32)
    small = values + (places.float() * 2.0**-23 - 0.5) * step
    return torch.where(values.isnan(), values, torch.where(values.abs() < info.smallest_normal, small, normal))


def grad_logits_fp8_reference(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
    ignore_index: int = IGNORE,
    counts: Tensor | None = None,
    transposed: bool = True,
    first_row: int = 0,
    form: LossForm = PLAIN,
) -> tuple[Tensor, Tensor]:
    exact = grad_logits_reference(logits, targets, lse, ignore_index, form)
    d = dither(exact * UNIT_SCALE[dtype], dtype, first_row).to(dtype)
    if counts is not None:
        counts[1] += ((exact != 0) & (d.float() == 0)).sum()
    return d, transpose_reference(d) if transposed else d.new_empty(0)


def _check_layout(logits: Tensor, targets: Tensor) -> tuple[int, int]:
    assert logits.stride(1) == 1 and targets.is_contiguous() and targets.shape == logits.shape[:1]
    length, width = logits.shape
    return length, width


def _softmax_stats(logits: Tensor, targets: Tensor, ignore_index: int, *form: float | None) -> tuple[Tensor, Tensor]:
    if not use_triton(logits):
        return softmax_stats_reference(logits, targets, ignore_index, LossForm(*form))
    length, width = _check_layout(logits, targets)
    lse = torch.empty(length, dtype=torch.float32, device=logits.device)
    loss = torch.empty_like(lse)
    tile = _fit_tile(STATISTICS_TILE, width)
    if length:
        launch_kernel(
            statistics_kernel, (length,),
            logits, targets, lse, loss, width, logits.stride(0), ignore_index, *form, **tile,
        )  # fmt: skip
    return lse, loss


def _grad_logits(
    logits: Tensor, targets: Tensor, lse: Tensor, factor: Tensor, out: Tensor, ignore_index: int, *form: float | None
) -> None:
    if not use_triton(logits):
        out.copy_(grad_logits_reference(logits, targets, lse, ignore_index, LossForm(*form)) * factor)
        return
    length, width = _check_layout(logits, targets)
    grid = (-(-length // GRADIENT_TILE["BLOCK_N"]) * -(-width // GRADIENT_TILE["BLOCK_V"]),)
    if length:
        launch_kernel(
            grad_logits_kernel, grid,
            logits, targets, lse, factor, out, length, width, logits.stride(0), out.stride(0), ignore_index,
            *form, **GRADIENT_TILE,
        )  # fmt: skip


def _loss_and_grad(
    logits: Tensor, targets: Tensor, factor: Tensor, out: Tensor, ignore_index: int, *form: float | None
) -> Tensor:
    if not use_triton(logits):
        lse, loss = softmax_stats_reference(logits, targets, ignore_index, LossForm(*form))
        out.copy_(grad_logits_reference(logits, targets, lse, ignore_index, LossForm(*form)) * factor)
        return loss
    length, width = _check_layout(logits, targets)
    loss = torch.empty(length, dtype=torch.float32, device=logits.device)
    tile = _fit_tile(LOSS_GRADIENT_TILE, width)
    if length:
        launch_kernel(
            loss_gradient_kernel, (length,),
            logits, targets, loss, factor, out, width, logits.stride(0), out.stride(0), ignore_index, *form, **tile,
        )  # fmt: skip
    return loss


def _fit_tile(tile: dict[str, int], width: int) -> dict[str, int]:
    """Shrink a tile that is much wider than a row."""
    if width >= tile["BLOCK"]:
        return tile
    block = max(128, 1 << (width - 1).bit_length())
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


def _grad_logits_fp8(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    counts: Tensor | None,
    out_t: Tensor | None,
    transposed: bool,
    first_row: int,
    *form: float | None,
) -> tuple[Tensor, Tensor]:
    if not use_triton(logits):
        d, d_t = grad_logits_fp8_reference(
            logits, targets, lse, dtype, ignore_index, counts, transposed, first_row, LossForm(*form)
        )
        if out_t is not None:
            out_t.copy_(transpose_reference(d))
        return d, d_t
    length, width = _check_layout(logits, targets)
    d = torch.empty(length, width, dtype=dtype, device=logits.device)
    in_words = transposed and length % 16 == 0
    d_t = d.new_empty((width, length) if in_words else 0)
    written = d_t if in_words else out_t
    if length:
        launch_kernel(
            grad_logits_fp8_kernel, tile_grid(length, width, LP_TILE),
            logits, targets, lse, d, None if written is None else written.view(torch.int32), counts, length, width,
            logits.stride(0), 0 if written is None else written.stride(0) // 16, ignore_index, first_row, *form,
            SCALE=UNIT_SCALE[dtype], SHIFT=math.log2(UNIT_SCALE[dtype]), FORMAT=get_format_name(dtype),
            COUNT=counts is not None, WHOLE=tiles_evenly(length, width, LP_TILE), **LP_TILE,
        )  # fmt: skip
    # If the rows are not a multiple of 16, [V, N] has no whole words; FP8 products do not accept such a shape either.
    return d, transpose_reference(d) if transposed and not in_words else d_t


_FORM = "float? multiplier, float? cap, float? smoothing"
_softmax_stats_op = torch.library.custom_op(
    "narrowgauge::softmax_statistics",
    _softmax_stats,
    mutates_args=(),
    schema=f"(Tensor logits, Tensor targets, int ignore_index, {_FORM}) -> (Tensor, Tensor)",
)
_grad_logits_op = torch.library.custom_op(
    "narrowgauge::grad_logits",
    _grad_logits,
    mutates_args=("out",),
    schema="(Tensor logits, Tensor targets, Tensor lse, Tensor factor, Tensor(a!) out, int ignore_index, "
    f"{_FORM}) -> ()",
)
_loss_and_grad_op = torch.library.custom_op(
    "narrowgauge::loss_gradient",
    _loss_and_grad,
    mutates_args=("out",),
    schema=f"(Tensor logits, Tensor targets, Tensor factor, Tensor(a!) out, int ignore_index, {_FORM}) -> Tensor",
)
_grad_logits_fp8_op = torch.library.custom_op(
    "narrowgauge::grad_logits_fp8",
    _grad_logits_fp8,
    mutates_args=("counts", "out_t"),
    schema="(Tensor logits, Tensor targets, Tensor lse, ScalarType dtype, int ignore_index, Tensor(a!)? counts, "
    f"Tensor(b!)? out_t, bool transposed, int first_row, {_FORM}) -> (Tensor, Tensor)",
)


@_softmax_stats_op.register_fake
def _(logits: Tensor, targets: Tensor, ignore_index: int, *form: float | None) -> tuple[Tensor, Tensor]:
    lse = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return lse, torch.empty_like(lse)


@_grad_logits_op.register_fake
def _(
    logits: Tensor, targets: Tensor, lse: Tensor, factor: Tensor, out: Tensor, ignore_index: int, *form: float | None
) -> None:
    return None


@_loss_and_grad_op.register_fake
def _(logits: Tensor, targets: Tensor, factor: Tensor, out: Tensor, ignore_index: int, *form: float | None) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@_grad_logits_fp8_op.register_fake
def _(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    counts: Tensor | None,
    out_t: Tensor | None,
    transposed: bool,
    first_row: int,
    *form: float | None,
) -> tuple[Tensor, Tensor]:
    d = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    return d, d.new_empty(logits.shape[::-1] if transposed else 0)
