"""Casts to FP8 with a scale for each block of 128 values, as DeepSeek-V3 has it.

    rows       blocks of 1 x 128 along the rows of x_lp, and along the rows of the transposed copy
    square     blocks of 128 x 128 (weights): the transposed copy is x_lp transposed, with the same scales

    amax       = max |x| of a block
    scale      = largest number / amax / 2**margin
    x_lp       = round(x * scale)
    inv_scale  = 1 / scale; NaN for a block with inf or NaN               so that every product with the block shows it
    saturated, flushed                                                    values of each row of x_lp

A block is within a tile, so one kernel reads ``x`` once, finds the scales and writes both copies: 4 bytes per element
of a BF16 x, where a scale for each row takes 6. The last block of a row or column may be shorter.

Inverse scales of rows, [N, D / 128], are stored column by column, as the product reads them (``block_product``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.kernels import HAVE_TRITON, can_bypass_op, compute_scale, define_op, jit, jit_unspecialized, use_triton
from narrowgauge.kernels.cast import allocate_words
from narrowgauge.kernels.cast_row_scales import ScaledCopies, find_scales
from narrowgauge.kernels.fp8_formats import FLUSH_THRESHOLD, FP8_MAX, SATURATION_THRESHOLD, get_format_name
from narrowgauge.kernels.fp8_tile import (
    abs_bits,
    count_misfits_of_rows,
    load_four,
    pack_fp8,
    store_rows,
    store_words,
    tile_grid,
    tile_origin,
    tiles_evenly,
    to_fp32,
)
from narrowgauge.kernels.launch import launch_kernel

if HAVE_TRITON or TYPE_CHECKING:
    import triton.language as tl

BLOCK = 128
"""Values of a block along the dimension that a product sums."""
TILE: dict[str, int] = {"BLOCK_N": BLOCK, "BLOCK_D": BLOCK, "num_warps": 8}


def cast_block_scales(
    x: Tensor, dtype: torch.dtype, transposed: bool = True, margin: int = 0, square: bool = False
) -> ScaledCopies:
    """Cast ``x`` [N, D] in BF16 or FP32 to FP8, as [N, D] and, if ``transposed``, as [D, N]."""
    made = (_cast if can_bypass_op(x) else _cast_op)(x, dtype, transposed, margin, square)
    return ScaledCopies(*made)


def cast_block_scales_reference(
    x: Tensor, dtype: torch.dtype, transposed: bool = True, margin: int = 0, square: bool = False
) -> ScaledCopies:
    wide = x.float()
    lp, inv_scale, saturated, flushed = _quantize_blocks(wide, dtype, margin, square)
    lp_t, inv_scale_t = lp.new_empty(0), inv_scale.new_empty(0)
    if transposed:
        lp_t, inv_scale_t, *_ = _quantize_blocks(wide.t(), dtype, margin, square)
    return ScaledCopies(lp, inv_scale, lp_t, inv_scale_t, wide.abs().amax(1), saturated, flushed)


def count_blocks(size: int) -> int:
    """Return the number of blocks of so many values."""
    return -(-size // BLOCK)


def expand_scales(inv_scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return the inverse scale of each value, [rows, columns] or broadcast to it, from those of blocks or rows."""
    if inv_scale.dim() < 2:
        return inv_scale
    if len(inv_scale) != rows:
        inv_scale = inv_scale.repeat_interleave(BLOCK, 0)[:rows]
    return inv_scale if inv_scale.shape[1] == 1 else inv_scale.repeat_interleave(BLOCK, 1)[:, :columns]


def max_abs_reference(x: Tensor, square: bool) -> Tensor:
    """Return the largest magnitude of each block, [rows or their blocks, blocks of columns]; NaN where there is one."""
    rows, columns = x.shape
    pad = (0, -columns % BLOCK, 0, -rows % BLOCK if square else 0)
    size = torch.nn.functional.pad(x.abs(), pad)
    return size.view(-1, BLOCK if square else 1, count_blocks(columns), BLOCK).amax((1, 3))


def _quantize_blocks(x: Tensor, dtype: torch.dtype, margin: int, square: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    limit = FP8_MAX[dtype]
    amax = max_abs_reference(x, square)
    scale = compute_scale(amax, limit, margin)
    inv_scale = torch.where(torch.isfinite(amax), scale.reciprocal(), torch.nan)
    scaled = x * expand_scales(scale, rows, columns)
    magnitude = scaled.abs()
    saturated = (magnitude > SATURATION_THRESHOLD[dtype]).sum(1, dtype=torch.int32)
    flushed = ((magnitude <= FLUSH_THRESHOLD[dtype]) & (scaled != 0)).sum(1, dtype=torch.int32)
    lp = scaled.clamp(-limit, limit).to(dtype).contiguous()
    return lp, _allocate_scales(x, rows, columns, square).copy_(inv_scale), saturated, flushed


@jit
def _store_block_rows(  # type: ignore[no-untyped-def]
    x, whole, out_ptr, inv_scale_ptr, row_amax_ptr, saturated_ptr, flushed_ptr, n, d0, length, width, shrink,
    FORMAT: tl.constexpr, SQUARE: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store every fourth row from ``n`` in FP8 with its scales, and the statistics of these rows."""
    index = n + 4 * tl.arange(0, BLOCK_N // 4)
    inside = index < length
    size = tl.max(abs_bits(x), 1)
    row_bits_ptr = row_amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(row_bits_ptr + index, size, mask=inside, sem="relaxed")
    if SQUARE:
        scale, _ = find_scales(whole, shrink, FORMAT)
        factor = scale
    else:
        scale, inverse = find_scales(size.to(tl.float32, bitcast=True), shrink, FORMAT)
        tl.store(inv_scale_ptr + (d0 // BLOCK_D).to(tl.int64) * length + index, inverse, mask=inside)
        factor = scale[:, None]
    y, _, _ = store_rows(
        x, 0, 0, out_ptr, factor, None, None, n, d0, length, width, width, FORMAT, WHOLE, BLOCK_N, BLOCK_D
    )
    saturated, flushed = count_misfits_of_rows(y, FORMAT)
    tl.atomic_add(saturated_ptr + index, saturated, mask=inside & (saturated > 0), sem="relaxed")
    tl.atomic_add(flushed_ptr + index, flushed, mask=inside & (flushed > 0), sem="relaxed")


@jit_unspecialized("length", "n16", "shrink")
def _block_scales_cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, out_t_ptr, inv_scale_ptr, inv_scale_t_ptr, row_amax_ptr, saturated_ptr, flushed_ptr,
    length, width, stride, n16, shrink,
    FORMAT: tl.constexpr, SQUARE: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write one tile in both layouts, each with its scales. ``shrink`` is 2**-margin."""
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    x0, x1, x2, x3 = load_four(x_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    x0, x1, x2, x3 = to_fp32(x0), to_fp32(x1), to_fp32(x2), to_fp32(x3)
    highest = tl.maximum(tl.maximum(abs_bits(x0), abs_bits(x1)), tl.maximum(abs_bits(x2), abs_bits(x3)))
    of_columns = tl.max(highest, 0)
    whole = tl.max(of_columns, 0).to(tl.float32, bitcast=True)
    _store_block_rows(
        x0, whole, out_ptr, inv_scale_ptr, row_amax_ptr, saturated_ptr, flushed_ptr, n0, d0, length, width, shrink,
        FORMAT, SQUARE, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    _store_block_rows(
        x1, whole, out_ptr, inv_scale_ptr, row_amax_ptr, saturated_ptr, flushed_ptr, n0 + 1, d0, length, width, shrink,
        FORMAT, SQUARE, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    _store_block_rows(
        x2, whole, out_ptr, inv_scale_ptr, row_amax_ptr, saturated_ptr, flushed_ptr, n0 + 2, d0, length, width, shrink,
        FORMAT, SQUARE, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    _store_block_rows(
        x3, whole, out_ptr, inv_scale_ptr, row_amax_ptr, saturated_ptr, flushed_ptr, n0 + 3, d0, length, width, shrink,
        FORMAT, SQUARE, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    down, across = n0 // BLOCK_N, d0 // BLOCK_D
    if SQUARE:
        scale, inverse = find_scales(whole, shrink, FORMAT)
        inside = n0 < length
        tl.store(inv_scale_ptr + down * tl.cdiv(width, BLOCK_D) + across, inverse, mask=inside)
        if out_t_ptr is not None:
            tl.store(inv_scale_t_ptr + across * tl.cdiv(length, BLOCK_N) + down, inverse, mask=inside)
            words = pack_fp8(x0 * scale, x1 * scale, x2 * scale, x3 * scale, FORMAT)
            store_words(words, out_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)
    elif out_t_ptr is not None:
        columns = d0 + tl.arange(0, BLOCK_D)
        inside = columns < tl.where(n0 < length, width, 0)
        scale, inverse = find_scales(of_columns.to(tl.float32, bitcast=True), shrink, FORMAT)
        tl.store(inv_scale_t_ptr + down.to(tl.int64) * width + columns, inverse, mask=inside)
        scale = scale[None, :]
        words = pack_fp8(x0 * scale, x1 * scale, x2 * scale, x3 * scale, FORMAT)
        store_words(words, out_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)


def _allocate_scales(like: Tensor, rows: int, columns: int, square: bool) -> Tensor:
    if square:
        return like.new_empty((count_blocks(rows), count_blocks(columns)), dtype=torch.float32)
    return like.new_empty((count_blocks(columns), rows), dtype=torch.float32).t()


def _allocate(x: Tensor, dtype: torch.dtype, transposed: bool, square: bool) -> tuple[Tensor, ...]:
    """Allocate lp, inv_scale, lp_t and inv_scale_t, uninitialized, and the statistics as zeros."""
    length, width = x.shape
    nothing = x.new_empty(0, dtype=torch.float32)
    return (
        x.new_empty((length, width), dtype=dtype),
        _allocate_scales(x, length, width, square),
        x.new_empty((width, length) if transposed else (0,), dtype=dtype),
        _allocate_scales(x, width, length, square) if transposed else nothing,
        x.new_zeros(length, dtype=torch.float32),
        x.new_zeros(length, dtype=torch.int32),
        x.new_zeros(length, dtype=torch.int32),
    )


def _cast(
    x: Tensor, dtype: torch.dtype, transposed: bool, margin: int, square: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if x.dim() != 2:
        raise UsageError(f"cast of a tensor of shape {tuple(x.shape)} with a scale for each block: expected a matrix")
    if dtype not in FP8_MAX:
        raise UsageError(f"cast to {dtype} with a scale for each block: expected float8_e4m3fn or float8_e5m2")
    if not use_triton(x) or not x.numel() or (transposed and len(x) % 16):
        return cast_block_scales_reference(x, dtype, transposed, margin, square)
    length, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    lp, inv_scale, lp_t, inv_scale_t, amax, saturated, flushed = _allocate(x, dtype, transposed, square)
    words = allocate_words(lp) if transposed else None
    launch_kernel(
        _block_scales_cast_kernel, tile_grid(length, width, TILE),
        x, lp, words, inv_scale, inv_scale_t if transposed else None, amax, saturated, flushed,
        length, width, x.stride(0), length // 16, 2.0**-margin,
        FORMAT=get_format_name(dtype), SQUARE=square, WHOLE=tiles_evenly(length, width, TILE), **TILE,
    )  # fmt: skip
    return lp, inv_scale, lp_t if words is None else words.view(dtype), inv_scale_t, amax, saturated, flushed


_cast_op = define_op(
    "cast_block_scales",
    _cast,
    lambda x, dtype, transposed, margin, square: _allocate(x, dtype, transposed, square),
)
