"""Cross-entropy of logits [N, V] in 16 bits: the loss, and its gradient in BF16 or in FP8 in both layouts.

    lse[n]  = log sum_v exp(x[n, v])                        loss[n] = lse[n] - x[n, target[n]]
    d[n, v] = exp(x[n, v] - lse[n]) - [v == target[n]]      in [-1, 1]; 0 in rows that are ignored

Inside, everything is FP32; the logits in FP32 never exist. Bytes per logit: the statistics read 2; the gradient reads 2
and writes 2 (BF16, in place if wanted) or 1 a layout (FP8). So forward and backward with both layouts move 6 bytes,
4.8 ms for GPT-2's 65,536 x 50,304 at an H200's 4.2 TB/s; in BF16 both are one kernel and move 4, 3.1 ms.

FP8 holds d * UNIT_SCALE: |d| <= 1, so the scale is a constant, and 1/tokens and the loss scale go into the inverse
scale of the product that reads d. Which format? The target's entry is near -1, most of a row is tiny (1/V and far
less). E5M2 has the range for both and rounds everything coarsely, which every layer below then sees, as the gradient
of the whole network begins here. E4M3 rounds half as coarsely but would flush most of the vocabulary, always
downwards. So E4M3 it is, dithered: a number below the smallest step of the format is added before rounding, even over
rows and over columns (a lattice, Roberts' R2), so that small entries are right on average, whichever way they are
summed. SQNR in dB against FP32, V = 50,304, unigram and context simulated, targets drawn from the softmax, 2,048 rows:

                          loss 10.8                loss 6.8                 loss 5.1
                          E5M2   E4M3   dithered   E5M2   E4M3   dithered   E5M2   E4M3   dithered
    grad_input            31.8   20.8   61.6       31.8   31.6   37.0       29.8   33.6   35.2
    grad_weight           47.2   36.5   62.7       28.6   36.5   36.8       31.4   36.5   36.5
    its rows, median      28.1   17.0   43.4       47.9    9.7   27.9       37.3   16.7   28.8
    sum of d over |d|, %  -1.9   +6.9   -0.001     -0.40  -1.8   -0.15      -0.36  -0.90  -0.17     should be 0

A row of grad_weight is one token's; what dithering adds to the rare ones' falls with the root of the number of rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.kernels import FP8_MAX, direct, use_triton
from narrowgauge.kernels.cast import transpose_reference
from narrowgauge.kernels.cross_entropy_kernels import (
    LATTICE,
    dlogits_kernel,
    dlogits_lp_kernel,
    loss_gradient_kernel,
    rescale_kernel,
    statistics_kernel,
)
from narrowgauge.kernels.dry_run import is_dry_run, launch
from narrowgauge.kernels.fp8_tile import FLUSHED, tiles, whole

IGNORE = -100
UNIT_SCALE: dict[torch.dtype, float] = {torch.float8_e4m3fn: 256.0, torch.float8_e5m2: 32768.0}
"""The largest power of two that keeps [-1, 1] within the format: the scale of FP8 gradients of the logits."""

# 63 registers: eight programs to an SM, each with 4 KB on its way, where Little's law asks for about 25 KB per SM.
STATISTICS_TILE: dict[str, int] = {"BLOCK": 2048, "num_warps": 4}
# Two programs to an SM, so that their 264 rows of 50,304 logits, 27 MB, are in the cache when they are read again; more
# registers than 32 a thread would leave one, which has nothing to do while it waits.
LOSS_GRADIENT_TILE: dict[str, int] = {"BLOCK": 8192, "num_warps": 32}
GRADIENT_TILE: dict[str, int] = {"BLOCK_N": 16, "BLOCK_V": 512, "num_warps": 8}
# Bands of tiles that run together, so that their columns lie side by side in [V, N], gained nothing (0.880 ms, 0.876).
LP_TILE: dict[str, int] = {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 8}
RESCALE_TILE: dict[str, int] = {"BLOCK": 4096, "num_warps": 8}


def softmax_statistics(logits: Tensor, targets: Tensor, ignore_index: int = IGNORE) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and loss of each row, in FP32, in one pass over the logits; the loss of an ignored row is 0.

    On a GPU a target outside the vocabulary gives a loss of NaN; on the CPU it raises.
    """
    return (_statistics if direct(logits, targets) else _statistics_op)(logits, targets, ignore_index)


def dlogits(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    factor: Tensor,
    ignore_index: int = IGNORE,
    out: Tensor | None = None,
) -> Tensor:
    """d * factor in the logits' format; ``out`` may be the logits themselves, which are then lost."""
    out = torch.empty_like(logits) if out is None else out
    (_dlogits if direct(logits, targets, out) else _dlogits_op)(logits, targets, lse, factor, out, ignore_index)
    return out


def loss_gradient(
    logits: Tensor, targets: Tensor, factor: Tensor, ignore_index: int = IGNORE, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and d * factor in the logits' format, in one pass over memory; ``out``: see ``dlogits``."""
    out = torch.empty_like(logits) if out is None else out
    run = _loss_gradient if direct(logits, targets, out) else _loss_gradient_op
    return run(logits, targets, factor, out, ignore_index), out


def dlogits_lp(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    ignore_index: int = IGNORE,
    counts: Tensor | None = None,
    transposed: bool = True,
    first_row: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """d * UNIT_SCALE[dtype] in FP8, dithered, as [N, V] and, where ``transposed``, as [V, N].

    ``first_row`` is where the rows stand in the whole, so that they come out the same whichever way they are parted;
    ``counts`` gets how many saturated (none can) and how many were flushed to zero: give it 64 bits.
    """
    run = _dlogits_lp if direct(logits, targets) else _dlogits_lp_op
    d, d_t = run(logits, targets, lse, dtype, ignore_index, counts, transposed, first_row)
    return d, d_t if transposed else None


def rescale_(tensor: Tensor, factor: Tensor) -> Tensor:
    """tensor *= factor in place, in FP32 inside. A factor of 1 costs a launch but no pass: the kernel looks and leaves.

    So a gradient made before its factor was known (a loss scale, 1/accumulate) is free where there is none.
    """
    launches = use_triton(tensor) and tensor.is_contiguous() and tensor.numel()
    if not (launches and (is_dry_run() or direct(tensor, factor))):
        return tensor.copy_(tensor.float() * factor)
    size = tensor.numel()
    events.report_launch("rescale", [tensor], [tensor])
    launch(rescale_kernel, (-(-size // RESCALE_TILE["BLOCK"]),), tensor, factor, size, **RESCALE_TILE)
    return tensor


def softmax_statistics_reference(logits: Tensor, targets: Tensor, ignore_index: int = IGNORE) -> tuple[Tensor, Tensor]:
    wide, counted = logits.float(), targets != ignore_index
    lse = torch.logsumexp(wide, 1)
    picked = wide.gather(1, torch.where(counted, targets, 0)[:, None])[:, 0]
    return lse, torch.where(counted, lse - picked, 0.0)


def gradient_reference(logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """d in FP32."""
    counted = (targets != ignore_index)[:, None]
    d = torch.exp(logits.float() - lse[:, None])
    d.scatter_add_(1, torch.where(counted, targets[:, None], 0), torch.full_like(lse, -1.0)[:, None])
    return torch.where(counted, d, 0.0)


def dithered(values: Tensor, dtype: torch.dtype, first_row: int = 0) -> Tensor:
    """Values [N, V] plus up to half of a format's smallest step to either side; a zero stays what rounds to zero."""
    rows, columns = (torch.arange(size, device=values.device) for size in values.shape)
    high = ((first_row + rows) * LATTICE[0] & 0xFFFFFFFF) >> 9
    wide = (columns * LATTICE[1] & 0xFFFFFFFF) >> 9
    even = ((high[:, None] + wide[None, :]) & 0x7FFFFF).float() * 2.0**-23
    return values + (even - 0.5) * (2 * FLUSHED[dtype])


def dlogits_lp_reference(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
    ignore_index: int = IGNORE,
    counts: Tensor | None = None,
    transposed: bool = True,
    first_row: int = 0,
) -> tuple[Tensor, Tensor]:
    exact = gradient_reference(logits, targets, lse, ignore_index)
    d = dithered(exact * UNIT_SCALE[dtype], dtype, first_row).to(dtype)
    if counts is not None:
        counts[1] += ((exact != 0) & (d.float() == 0)).sum()
    return d, transpose_reference(d) if transposed else d.new_empty(0)


def _checked(logits: Tensor, targets: Tensor) -> tuple[int, int]:
    assert logits.stride(1) == 1 and targets.is_contiguous() and targets.shape == logits.shape[:1]
    length, width = logits.shape
    return length, width


def _statistics(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    if not use_triton(logits):
        return softmax_statistics_reference(logits, targets, ignore_index)
    length, width = _checked(logits, targets)
    lse = torch.empty(length, dtype=torch.float32, device=logits.device)
    loss = torch.empty_like(lse)
    tile = _fitting(STATISTICS_TILE, width)
    if length:
        statistics_kernel[(length,)](logits, targets, lse, loss, width, logits.stride(0), ignore_index, **tile)
    return lse, loss


def _dlogits(logits: Tensor, targets: Tensor, lse: Tensor, factor: Tensor, out: Tensor, ignore_index: int) -> None:
    if not use_triton(logits):
        out.copy_(gradient_reference(logits, targets, lse, ignore_index) * factor)
        return
    length, width = _checked(logits, targets)
    grid = (-(-length // GRADIENT_TILE["BLOCK_N"]) * -(-width // GRADIENT_TILE["BLOCK_V"]),)
    if length:
        dlogits_kernel[grid](
            logits, targets, lse, factor, out, length, width, logits.stride(0), out.stride(0), ignore_index,
            **GRADIENT_TILE,
        )  # fmt: skip


def _loss_gradient(logits: Tensor, targets: Tensor, factor: Tensor, out: Tensor, ignore_index: int) -> Tensor:
    if not use_triton(logits):
        lse, loss = softmax_statistics_reference(logits, targets, ignore_index)
        out.copy_(gradient_reference(logits, targets, lse, ignore_index) * factor)
        return loss
    length, width = _checked(logits, targets)
    loss = torch.empty(length, dtype=torch.float32, device=logits.device)
    tile = _fitting(LOSS_GRADIENT_TILE, width)
    if length:
        loss_gradient_kernel[(length,)](
            logits, targets, loss, factor, out, width, logits.stride(0), out.stride(0), ignore_index, **tile
        )
    return loss


def _fitting(tile: dict[str, int], width: int) -> dict[str, int]:
    """A tile that is not much wider than a row."""
    if width >= tile["BLOCK"]:
        return tile
    block = max(128, 1 << (width - 1).bit_length())
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


def _dlogits_lp(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    counts: Tensor | None,
    transposed: bool,
    first_row: int,
) -> tuple[Tensor, Tensor]:
    if not use_triton(logits):
        return dlogits_lp_reference(logits, targets, lse, dtype, ignore_index, counts, transposed, first_row)
    length, width = _checked(logits, targets)
    d = torch.empty(length, width, dtype=dtype, device=logits.device)
    in_words = transposed and length % 16 == 0
    d_t = d.new_empty((width, length) if in_words else 0)
    if length:
        dlogits_lp_kernel[tiles(length, width, LP_TILE)](
            logits, targets, lse, d, d_t.view(torch.int32) if in_words else None, counts, length, width,
            logits.stride(0), length // 16, ignore_index, first_row,
            SCALE=UNIT_SCALE[dtype], SHIFT=math.log2(UNIT_SCALE[dtype]), LIMIT=FP8_MAX[dtype], TINY=FLUSHED[dtype],
            COUNT=counts is not None, WHOLE=whole(length, width, LP_TILE), **LP_TILE,
        )  # fmt: skip
    # Rows that are no multiple of 16 have no whole words in [V, N]; no FP8 product would take them either.
    return d, transpose_reference(d) if transposed and not in_words else d_t


_statistics_op = torch.library.custom_op(
    "narrowgauge::softmax_statistics",
    _statistics,
    mutates_args=(),
    schema="(Tensor logits, Tensor targets, int ignore_index) -> (Tensor, Tensor)",
)
_dlogits_op = torch.library.custom_op(
    "narrowgauge::dlogits",
    _dlogits,
    mutates_args=("out",),
    schema="(Tensor logits, Tensor targets, Tensor lse, Tensor factor, Tensor(a!) out, int ignore_index) -> ()",
)
_loss_gradient_op = torch.library.custom_op(
    "narrowgauge::loss_gradient",
    _loss_gradient,
    mutates_args=("out",),
    schema="(Tensor logits, Tensor targets, Tensor factor, Tensor(a!) out, int ignore_index) -> Tensor",
)
_dlogits_lp_op = torch.library.custom_op(
    "narrowgauge::dlogits_lp",
    _dlogits_lp,
    mutates_args=("counts",),
    schema="(Tensor logits, Tensor targets, Tensor lse, ScalarType dtype, int ignore_index, Tensor(a!)? counts, "
    "bool transposed, int first_row) -> (Tensor, Tensor)",
)


@_statistics_op.register_fake
def _(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    lse = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return lse, torch.empty_like(lse)


@_dlogits_op.register_fake
def _(logits: Tensor, targets: Tensor, lse: Tensor, factor: Tensor, out: Tensor, ignore_index: int) -> None:
    return None


@_loss_gradient_op.register_fake
def _(logits: Tensor, targets: Tensor, factor: Tensor, out: Tensor, ignore_index: int) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@_dlogits_lp_op.register_fake
def _(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    counts: Tensor | None,
    transposed: bool,
    first_row: int,
) -> tuple[Tensor, Tensor]:
    d = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    return d, d.new_empty(logits.shape[::-1] if transposed else 0)
