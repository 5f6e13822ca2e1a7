"""Casts to FP8 with a scale for each row, and in the transposed copy with a scale for each of its own rows.

    amax       = max |x| of each row                                       of each column for the transposed copy
    scale      = largest number / amax / 2**margin
    x_lp       = round(x * scale)                                          row by row
    inv_scale  = 1 / scale, [N, 1];  NaN for a row with inf or NaN         so that every product with the row shows it
    x_lp_t     = round(x.T * scale_t)                                      x_lp transposed has other scales
    saturated, flushed                                                     values of each row of x_lp

A product sums along the rows of both operands, so a scale of a row is a factor of the sum. x and x.T are different
operands to it, with different scales: the transposed copy is cast from ``x``, not from ``x_lp``.

Two kernels: one reads ``x`` for the amax of rows and columns at once, the other reads it again and writes both copies.
Bytes moved per element of a BF16 x: 6 with the transposed copy, 5 without. ``fp8_tile`` explains how it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.kernels import HAVE_TRITON, can_bypass_op, compute_scale, define_op, jit, jit_unspecialized, use_triton
from narrowgauge.kernels.cast import allocate_words
from narrowgauge.kernels.fp8_formats import FLUSH_THRESHOLD, FP8_MAX, SATURATION_THRESHOLD, get_format_name, largest_of
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

TILE: dict[str, int] = {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 4}
AMAX_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 128, "num_warps": 4}
AMAX_STEPS = 8
"""Tiles below each other that one program reads: it raises the amax of its columns only once."""


class ScaledCopies(NamedTuple):
    """A matrix in FP8 with the inverse scales of its rows or blocks, and the statistics of its rows."""

    lp: Tensor
    inv_scale: Tensor
    lp_t: Tensor
    """The transposed copy; empty if it was not requested, as its inverse scales."""
    inv_scale_t: Tensor
    amax: Tensor
    saturated: Tensor
    flushed: Tensor


def cast_row_scales(x: Tensor, dtype: torch.dtype, transposed: bool = True, margin: int = 0) -> ScaledCopies:
    """Cast ``x`` [N, D] in BF16 or FP32 to FP8, as [N, D] and, if ``transposed``, as [D, N]."""
    bypass = can_bypass_op(x)
    row_amax, column_amax = (_max_abs if bypass else _max_abs_op)(x, transposed)
    lp, inv_scale, lp_t, inv_scale_t, *counts = (_cast if bypass else _cast_op)(
        x, row_amax, column_amax, dtype, transposed, margin
    )
    return ScaledCopies(lp, inv_scale, lp_t, inv_scale_t, row_amax, *counts)


def cast_row_scales_reference(x: Tensor, dtype: torch.dtype, transposed: bool = True, margin: int = 0) -> ScaledCopies:
    row_amax, column_amax = max_abs_reference(x, transposed)
    lp, inv_scale, *counts = _quantize_rows(x.float(), row_amax, dtype, margin)
    lp_t, inv_scale_t = lp.new_empty(0), inv_scale.new_empty(0)
    if transposed:
        lp_t, inv_scale_t, *_ = _quantize_rows(x.float().t(), column_amax, dtype, margin)
    return ScaledCopies(lp, inv_scale, lp_t, inv_scale_t, row_amax, *counts)


def max_abs_reference(x: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the largest magnitudes of rows, and of columns if ``transposed``; NaN where there is one."""
    size = x.float().abs()
    return size.amax(1), size.amax(0) if transposed else size.new_empty(0)


def _quantize_rows(x: Tensor, amax: Tensor, dtype: torch.dtype, margin: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    limit = FP8_MAX[dtype]
    scale = compute_scale(amax, limit, margin)
    inv_scale = torch.where(torch.isfinite(amax), scale.reciprocal(), torch.nan)
    scaled = x * scale[:, None]
    size = scaled.abs()
    saturated = (size > SATURATION_THRESHOLD[dtype]).sum(1, dtype=torch.int32)
    flushed = ((size <= FLUSH_THRESHOLD[dtype]) & (scaled != 0)).sum(1, dtype=torch.int32)
    lp = scaled.clamp(-limit, limit).to(dtype).contiguous()
    return lp, inv_scale[:, None], saturated, flushed


@jit_unspecialized("length")
def _row_max_abs_kernel(  # type: ignore[no-untyped-def]
    x_ptr, row_amax_ptr, column_amax_ptr, length, width, stride,
    STEPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Raise the amax of rows and columns, as bits: bits order like floats, with NaN above inf."""
    n0, d0 = tile_origin(BLOCK_N * STEPS, BLOCK_D)
    columns = d0 + tl.arange(0, BLOCK_D)
    row_bits_ptr = row_amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    highest = tl.zeros((BLOCK_N, BLOCK_D), tl.int32)
    for step in range(STEPS):
        rows = n0 + step * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (rows < length)[:, None] & (columns < width)[None, :]
        x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)
        size = abs_bits(x.to(tl.float32))
        highest = tl.maximum(highest, size)
        tl.atomic_max(row_bits_ptr + rows, tl.max(size, 1), mask=rows < length, sem="relaxed")
    if column_amax_ptr is not None:
        column_bits_ptr = column_amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_max(column_bits_ptr + columns, tl.max(highest, 0), mask=columns < width, sem="relaxed")


@jit
def find_scales(amax, shrink, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scales of rows or blocks with these amax, and their inverses, as ``_quantize_rows`` has them."""
    bits = abs_bits(amax)
    finite = bits < 0x7F800000
    good = (bits > 0) & finite
    scale = tl.div_rn(tl.where(good, largest_of(FORMAT), 1.0), tl.where(good, amax, 1.0)) * shrink
    scale = tl.where(good, tl.minimum(tl.maximum(scale, 2.0**-100), 2.0**100), 1.0)
    inverse = tl.div_rn(tl.where(good, 1.0, 1.0), scale)
    return scale, tl.where(finite, inverse, float("nan"))


@jit
def _scales_of(amax_ptr, index, count, shrink, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    return find_scales(tl.load(amax_ptr + index, mask=index < count, other=0.0), shrink, FORMAT)


@jit
def _store_scaled_rows(  # type: ignore[no-untyped-def]
    x, out_ptr, inv_scale_ptr, row_amax_ptr, saturated_ptr, flushed_ptr, n, d0, length, width, shrink,
    FORMAT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store every fourth row from ``n`` in FP8, count what does not fit, and store the scales once."""
    index = n + 4 * tl.arange(0, BLOCK_N // 4)
    scale, inverse = _scales_of(row_amax_ptr, index, length, shrink, FORMAT)
    y, _, _ = store_rows(
        x, 0, 0, out_ptr, scale[:, None], None, None, n, d0, length, width, width, FORMAT, WHOLE, BLOCK_N, BLOCK_D
    )
    saturated, flushed = count_misfits_of_rows(y, FORMAT)
    tl.atomic_add(saturated_ptr + index, saturated, mask=(index < length) & (saturated > 0), sem="relaxed")
    tl.atomic_add(flushed_ptr + index, flushed, mask=(index < length) & (flushed > 0), sem="relaxed")
    if d0 == 0:
        tl.store(inv_scale_ptr + index, inverse, mask=index < length)


@jit_unspecialized("length", "n16", "shrink")
def _row_scales_cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, out_t_ptr, inv_scale_ptr, inv_scale_t_ptr, row_amax_ptr, column_amax_ptr,
    saturated_ptr, flushed_ptr, length, width, stride, n16, shrink,
    FORMAT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write one tile in both layouts, each with its scales. ``shrink`` is 2**-margin."""
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    x0, x1, x2, x3 = load_four(x_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    x0, x1, x2, x3 = to_fp32(x0), to_fp32(x1), to_fp32(x2), to_fp32(x3)
    _store_scaled_rows(
        x0, out_ptr, inv_scale_ptr, row_amax_ptr, saturated_ptr, flushed_ptr, n0, d0, length, width, shrink,
        FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    _store_scaled_rows(
        x1, out_ptr, inv_scale_ptr, row_amax_ptr, saturated_ptr, flushed_ptr, n0 + 1, d0, length, width, shrink,
        FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    _store_scaled_rows(
        x2, out_ptr, inv_scale_ptr, row_amax_ptr, saturated_ptr, flushed_ptr, n0 + 2, d0, length, width, shrink,
        FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    _store_scaled_rows(
        x3, out_ptr, inv_scale_ptr, row_amax_ptr, saturated_ptr, flushed_ptr, n0 + 3, d0, length, width, shrink,
        FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if out_t_ptr is not None:
        columns = d0 + tl.arange(0, BLOCK_D)
        scale, inverse = _scales_of(column_amax_ptr, columns, width, shrink, FORMAT)
        scale = scale[None, :]
        words = pack_fp8(x0 * scale, x1 * scale, x2 * scale, x3 * scale, FORMAT)
        store_words(words, out_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)
        if n0 == 0:
            tl.store(inv_scale_t_ptr + columns, inverse, mask=columns < width)


def _max_abs(x: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    if x.dim() != 2:
        raise UsageError(f"cast of a tensor of shape {tuple(x.shape)} with a scale for each row: expected a matrix")
    if not use_triton(x) or not x.numel():
        return max_abs_reference(x, transposed)
    length, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    row_amax = x.new_zeros(length, dtype=torch.float32)
    column_amax = x.new_zeros(width if transposed else 0, dtype=torch.float32)
    strip = {**AMAX_TILE, "BLOCK_N": AMAX_TILE["BLOCK_N"] * AMAX_STEPS}
    launch_kernel(
        _row_max_abs_kernel, tile_grid(length, width, strip),
        x, row_amax, column_amax if transposed else None, length, width, x.stride(0), STEPS=AMAX_STEPS, **AMAX_TILE,
    )  # fmt: skip
    return row_amax, column_amax


def _cast(
    x: Tensor, row_amax: Tensor, column_amax: Tensor, dtype: torch.dtype, transposed: bool, margin: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if dtype not in FP8_MAX:
        raise UsageError(f"cast to {dtype} with a scale for each row: expected float8_e4m3fn or float8_e5m2")
    length, width = x.shape
    lp = x.new_empty((length, width), dtype=dtype)
    words = allocate_words(lp) if transposed else None
    if not use_triton(x) or not x.numel() or (transposed and words is None):
        lp, inv_scale, lp_t, inv_scale_t, _, *counts = cast_row_scales_reference(x, dtype, transposed, margin)
        return lp, inv_scale, lp_t, inv_scale_t, counts[0], counts[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    inv_scale = row_amax.new_empty((length, 1))
    inv_scale_t = row_amax.new_empty((width, 1) if transposed else (0,))
    saturated, flushed = (x.new_zeros(length, dtype=torch.int32) for _ in range(2))
    launch_kernel(
        _row_scales_cast_kernel, tile_grid(length, width, TILE),
        x, lp, words, inv_scale, inv_scale_t if transposed else None,
        row_amax, column_amax if transposed else None, saturated, flushed,
        length, width, x.stride(0), length // 16, 2.0**-margin,
        FORMAT=get_format_name(dtype), WHOLE=tiles_evenly(length, width, TILE), **TILE,
    )  # fmt: skip
    lp_t = lp.new_empty(0) if words is None else words.view(dtype)
    return lp, inv_scale, lp_t, inv_scale_t, saturated, flushed


def _fake_cast(
    x: Tensor, row_amax: Tensor, column_amax: Tensor, dtype: torch.dtype, transposed: bool, margin: int
) -> tuple[Tensor, ...]:
    length, width = x.shape
    across, down = ((width, length), (width, 1)) if transposed else ((0,), (0,))
    return (
        x.new_empty((length, width), dtype=dtype),
        x.new_empty((length, 1), dtype=torch.float32),
        x.new_empty(across, dtype=dtype),
        x.new_empty(down, dtype=torch.float32),
        x.new_empty(length, dtype=torch.int32),
        x.new_empty(length, dtype=torch.int32),
    )


_max_abs_op = define_op(
    "max_abs_of_rows",
    _max_abs,
    lambda x, transposed: (
        x.new_empty(x.shape[0], dtype=torch.float32),
        x.new_empty(x.shape[1] if transposed else 0, dtype=torch.float32),
    ),
)
_cast_op = define_op("cast_row_scales", _cast, _fake_cast)
