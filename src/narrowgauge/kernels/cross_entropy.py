"""Cross-entropy of logits [N, V] in 16 bits: the loss, and its gradient in BF16 or in FP8 in both layouts.

    lse[n]  = log sum_v exp(x[n, v])                        loss[n] = lse[n] - x[n, target[n]]
    d[n, v] = exp(x[n, v] - lse[n]) - [v == target[n]]      in [-1, 1]; 0 in rows that are ignored

Inside, everything is FP32; the logits in FP32 never exist. Bytes per logit: the statistics read 2; the gradient reads 2
and writes 2 (BF16, in place if wanted) or 1 a layout (FP8). So forward and backward with both layouts move 6 bytes,
4.8 ms for GPT-2's 65,536 x 50,304 at an H200's 4.2 TB/s.

FP8 holds d * UNIT_SCALE: |d| <= 1, so the scale is a constant, and 1/tokens and the loss scale go into the inverse
scale of the product that reads d. Which format? Most of a row is tiny (1/V and far less), the target's entry is near
-1. SQNR in dB against FP32, V = 50,304, unigram and context simulated, targets drawn from the softmax; a row of
grad_weight is one token's, and Adam makes rows of small gradients as important as the others:

                   loss 11.0 (start)       loss 6.5                loss 4.4
                   E4M3 x256   E5M2 x32768 E4M3        E5M2        E4M3        E5M2
    d              66.2        71.2        38.7        33.2        35.7        30.2
    grad_input     65.6        70.2        25.5        31.7        31.2        27.6
    grad_weight    66.2        71.2        38.7        33.2        35.6        30.2
    its worst 5%   22.6        28.1        13.7        26.5        17.8        22.8    rows whose token is no target
    rows < 20 dB   0%          0%          38%         0%          9%          0.3%
    flushed to 0   0.4%        0%          76%         0%          92%         12%
    sum of d       -3.7e-5     -1.4e-3     -1.3e-2     -3.4e-3     -6.5e-3     -3.7e-3  of sum |d|; it should be 0

E5M2 is the better one: E4M3 wins where the large entries rule, but flushes most of the vocabulary, always downwards.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowgauge.kernels import FP8_MAX, HAVE_TRITON, direct, jit, use_triton
from narrowgauge.kernels.cast import transpose_reference
from narrowgauge.kernels.tile import FLUSHED, load_rows, pack_fp8, store_words, to_fp8

if HAVE_TRITON:
    import triton.language as tl

IGNORE = -100
UNIT_SCALE: dict[torch.dtype, float] = {torch.float8_e4m3fn: 256.0, torch.float8_e5m2: 32768.0}
"""The largest power of two that keeps [-1, 1] within the format: the scale of FP8 gradients of the logits."""

# 63 registers: eight programs to an SM, each with 4 KB on its way, where Little's law asks for about 25 KB per SM.
STATISTICS_TILE: dict[str, int] = {"BLOCK": 2048, "num_warps": 4}
GRADIENT_TILE: dict[str, int] = {"BLOCK_N": 16, "BLOCK_V": 512, "num_warps": 8}
# BAND tiles below each other run together, so that their columns lie side by side in [V, N]; it turned out to gain
# nothing with this tile (bench/tune_kernels.py on an H200: 0.876 ms with 1, 0.880 with 8).
LP_TILE: dict[str, int] = {"BLOCK_N": 128, "BLOCK_V": 64, "BAND": 1, "num_warps": 4}
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


def dlogits_lp(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dtype: torch.dtype = torch.float8_e5m2,
    ignore_index: int = IGNORE,
    counts: Tensor | None = None,
    transposed: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """d * UNIT_SCALE[dtype] in FP8, as [N, V] and, where ``transposed``, as [V, N].

    ``counts`` gets how many saturated (none can) and how many were flushed to zero: give it 64 bits.
    """
    run = _dlogits_lp if direct(logits, targets) else _dlogits_lp_op
    d, d_t = run(logits, targets, lse, dtype, ignore_index, counts, transposed)
    return d, d_t if transposed else None


def rescale_(tensor: Tensor, factor: Tensor) -> Tensor:
    """tensor *= factor in place, in FP32 inside. A factor of 1 costs a launch but no pass: the kernel looks and leaves.

    So a gradient made before its factor was known (a loss scale, 1/accumulate) is free where there is none.
    """
    if not (use_triton(tensor) and tensor.is_contiguous() and tensor.numel() and direct(tensor, factor)):
        return tensor.copy_(tensor.float() * factor)
    size = tensor.numel()
    _rescale_kernel[(-(-size // RESCALE_TILE["BLOCK"]),)](tensor, factor, size, **RESCALE_TILE)
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


def dlogits_lp_reference(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
    ignore_index: int = IGNORE,
    counts: Tensor | None = None,
    transposed: bool = True,
) -> tuple[Tensor, Tensor]:
    exact = gradient_reference(logits, targets, lse, ignore_index)
    d = (exact * UNIT_SCALE[dtype]).to(dtype)
    if counts is not None:
        counts[1] += ((exact != 0) & (d.float() == 0)).sum()
    return d, transpose_reference(d) if transposed else d.new_empty(0)


@jit
def _statistics_kernel(logits_ptr, targets_ptr, lse_ptr, loss_ptr, width, stride, ignore_index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    LOG2E: tl.constexpr = 1.4426950408889634  # exp2 of a fused multiply-add: 2 instructions, where exp takes 6
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    columns = tl.arange(0, BLOCK)
    # The lowest number rather than -inf: a block of logits that are all -inf would give -inf - -inf.
    top = tl.full([], -3.4028234663852886e38, tl.float32)
    # One maximum for all lanes, so that a logit costs one exponential; the lanes' sums stay apart until the end.
    total = tl.zeros([BLOCK], tl.float32)
    ahead = tl.load(logits_ptr + columns, mask=columns < width, other=float("-inf"))
    for start in range(0, width, BLOCK):
        x = ahead.to(tl.float32)
        following = start + BLOCK + columns
        ahead = tl.load(logits_ptr + following, mask=following < width, other=float("-inf"))  # under way meanwhile
        higher = tl.maximum(top, tl.max(x, 0) * LOG2E)
        total = total * tl.exp2(top - higher) + tl.exp2(x * LOG2E - higher)
        top = higher
    lse = (top + tl.log2(tl.sum(total, 0))) / LOG2E
    target = tl.load(targets_ptr + row)
    picked = tl.load(logits_ptr + target, mask=(target >= 0) & (target < width), other=float("nan")).to(tl.float32)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, tl.where(target != ignore_index, lse - picked, 0.0))


@jit
def _gradient(x, targets_ptr, lse_ptr, row, columns, length, ignore_index, scale, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """d * scale for the logits x of some rows, with 2**SHIFT = scale: it joins the exponent, so it costs nothing."""
    LOG2E: tl.constexpr = 1.4426950408889634
    target = tl.load(targets_ptr + row, mask=row < length, other=ignore_index).to(tl.int32)
    offset = SHIFT - tl.load(lse_ptr + row, mask=row < length, other=0.0) * LOG2E
    d = tl.exp2(x.to(tl.float32) * LOG2E + offset[:, None])
    d = tl.where(columns[None, :] == target[:, None], d - scale, d)
    return tl.where((target != ignore_index)[:, None], d, 0.0)


@jit
def _dlogits_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, lse_ptr, factor_ptr, out_ptr, length, width, stride, out_stride, ignore_index,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, BLOCK_V)
    row = (tl.program_id(0) // across) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = (tl.program_id(0) % across) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = (row < length)[:, None] & (columns < width)[None, :]
    wide = row.to(tl.int64)[:, None]  # GPT-2's 65,536 x 50,304 logits are more than 2^31
    x = tl.load(logits_ptr + wide * stride + columns[None, :], mask=mask, other=0.0)
    d = _gradient(x, targets_ptr, lse_ptr, row, columns, length, ignore_index, 1.0, 0.0) * tl.load(factor_ptr)
    tl.store(out_ptr + wide * out_stride + columns[None, :], d.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _put(  # type: ignore[no-untyped-def]
    x, flushed, targets_ptr, lse_ptr, out_ptr, row, columns, length, width, ignore_index,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Store d * SCALE of a tile of rows in FP8. TINY: count what becomes zero."""
    d = _gradient(x, targets_ptr, lse_ptr, row, columns, length, ignore_index, SCALE, SHIFT)
    mask = (row < length)[:, None] & (columns < width)[None, :]
    if TINY is not None:
        flushed += tl.where(mask & (d != 0.0) & (tl.abs(d) <= TINY), 1, 0)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * width + columns[None, :], to_fp8(d, LIMIT), mask=mask)
    return d, flushed


@jit
def _dlogits_lp_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, lse_ptr, out_ptr, words_ptr, counts_ptr, length, width, stride, n16, ignore_index,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, BLOCK_V)
    band = tl.program_id(0) // (BAND * across)
    place = tl.program_id(0) % (BAND * across)
    high = tl.minimum(tl.cdiv(length, BLOCK_N) - band * BAND, BAND)  # the last band may be lower
    n0 = (band * BAND + place % high) * BLOCK_N
    d0 = (place // high) * BLOCK_V

    # Every fourth row makes a tile, so that the four bytes of a transposed word are in one thread: see ``tile``.
    x0 = load_rows(logits_ptr, n0, d0, length, width, stride, BLOCK_N, BLOCK_V)
    x1 = load_rows(logits_ptr, n0 + 1, d0, length, width, stride, BLOCK_N, BLOCK_V)
    x2 = load_rows(logits_ptr, n0 + 2, d0, length, width, stride, BLOCK_N, BLOCK_V)
    x3 = load_rows(logits_ptr, n0 + 3, d0, length, width, stride, BLOCK_N, BLOCK_V)
    row = n0 + 4 * tl.arange(0, BLOCK_N // 4)
    c = d0 + tl.arange(0, BLOCK_V)
    f = tl.zeros([BLOCK_N // 4, BLOCK_V], tl.int32)
    y0, f = _put(x0, f, targets_ptr, lse_ptr, out_ptr, row, c, length, width, ignore_index, SCALE, SHIFT, LIMIT, TINY)
    y1, f = _put(
        x1, f, targets_ptr, lse_ptr, out_ptr, row + 1, c, length, width, ignore_index, SCALE, SHIFT, LIMIT, TINY
    )
    y2, f = _put(
        x2, f, targets_ptr, lse_ptr, out_ptr, row + 2, c, length, width, ignore_index, SCALE, SHIFT, LIMIT, TINY
    )
    y3, f = _put(
        x3, f, targets_ptr, lse_ptr, out_ptr, row + 3, c, length, width, ignore_index, SCALE, SHIFT, LIMIT, TINY
    )
    if words_ptr is not None:
        store_words(pack_fp8(y0, y1, y2, y3, LIMIT), words_ptr, n0, d0, n16, width, BLOCK_N, BLOCK_V)
    if counts_ptr is not None:
        tl.atomic_add(counts_ptr + 1, tl.sum(f).to(counts_ptr.dtype.element_ty), sem="relaxed")


@jit
def _rescale_kernel(tensor_ptr, factor_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(tensor_ptr + offsets, mask=offsets < size)
        tl.store(tensor_ptr + offsets, (x.to(tl.float32) * factor).to(x.dtype), mask=offsets < size)


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
    tile = STATISTICS_TILE
    if width < tile["BLOCK"]:
        block = max(128, 1 << (width - 1).bit_length())
        tile = {"BLOCK": block, "num_warps": max(1, block // 512)}
    if length:
        _statistics_kernel[(length,)](logits, targets, lse, loss, width, logits.stride(0), ignore_index, **tile)
    return lse, loss


def _dlogits(logits: Tensor, targets: Tensor, lse: Tensor, factor: Tensor, out: Tensor, ignore_index: int) -> None:
    if not use_triton(logits):
        out.copy_(gradient_reference(logits, targets, lse, ignore_index) * factor)
        return
    length, width = _checked(logits, targets)
    grid = (-(-length // GRADIENT_TILE["BLOCK_N"]) * -(-width // GRADIENT_TILE["BLOCK_V"]),)
    if length:
        _dlogits_kernel[grid](
            logits, targets, lse, factor, out, length, width, logits.stride(0), out.stride(0), ignore_index,
            **GRADIENT_TILE,
        )  # fmt: skip


def _dlogits_lp(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    counts: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    if not use_triton(logits):
        return dlogits_lp_reference(logits, targets, lse, dtype, ignore_index, counts, transposed)
    length, width = _checked(logits, targets)
    d = torch.empty(length, width, dtype=dtype, device=logits.device)
    in_words = transposed and length % 16 == 0
    d_t = d.new_empty((width, length) if in_words else 0)
    grid = (-(-length // LP_TILE["BLOCK_N"]) * -(-width // LP_TILE["BLOCK_V"]),)
    if length:
        _dlogits_lp_kernel[grid](
            logits, targets, lse, d, d_t.view(torch.int32) if in_words else None, counts, length, width,
            logits.stride(0), length // 16, ignore_index, SCALE=UNIT_SCALE[dtype], SHIFT=math.log2(UNIT_SCALE[dtype]),
            LIMIT=FP8_MAX[dtype], TINY=None if counts is None else FLUSHED[dtype], **LP_TILE,
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
_dlogits_lp_op = torch.library.custom_op(
    "narrowgauge::dlogits_lp",
    _dlogits_lp,
    mutates_args=("counts",),
    schema="(Tensor logits, Tensor targets, Tensor lse, ScalarType dtype, int ignore_index, Tensor(a!)? counts, "
    "bool transposed) -> (Tensor, Tensor)",
)


@_statistics_op.register_fake
def _(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    lse = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return lse, torch.empty_like(lse)


@_dlogits_op.register_fake
def _(logits: Tensor, targets: Tensor, lse: Tensor, factor: Tensor, out: Tensor, ignore_index: int) -> None:
    return None


@_dlogits_lp_op.register_fake
def _(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    counts: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    d = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    return d, d.new_empty(logits.shape[::-1] if transposed else 0)
