"""Casts for compiled graphs: inductor computes the cast in the kernel that produces the tensor.

    cast_rows     x_lp = round(clamp(x * scale)),  and for each row: max |x|, how many saturate, how many become 0
    record_rows   raises a site's amax and counts by those of the rows, and writes the transposed copy of x_lp

``cast_rows`` is an op to torch, and arithmetic to inductor (``inductor_lowering``): the producer writes one byte per
element where it would have written two or four, and no kernel reads them again. Statistics are per row: inductor fuses
a reduction of rows with a norm, an activation or a softmax over the same rows, but not a reduction of a whole tensor.
``record_rows`` reads one byte per element and writes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, define_op, jit_unspecialized, use_triton
from narrowgauge.kernels.cast import TRANSPOSE_TILE, allocate_words, finish_transposed
from narrowgauge.kernels.fp8_formats import FLUSH_THRESHOLD, FP8_MAX, SATURATION_THRESHOLD
from narrowgauge.kernels.fp8_tile import (
    abs_bits,
    load_four,
    pack_bytes,
    record_amax,
    store_words,
    tile_grid,
    tile_origin,
    tiles_evenly,
)
from narrowgauge.kernels.launch import launch_kernel

if HAVE_TRITON or TYPE_CHECKING:
    import triton.language as tl

RECORD_ROWS = 1024
"""Rows of a program that only records."""


def cast_rows_reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast ``x`` [N, D]; return it with each row's amax, saturated values and flushed values.

    ``scale`` is a scalar of its own, not a row of a table: inductor would compile a kernel for each row.
    """
    x = x.float()
    scaled, limit = x * scale, FP8_MAX[dtype]
    size = scaled.abs()
    saturated = (size > SATURATION_THRESHOLD[dtype]).sum(1, dtype=torch.int32)
    flushed = ((size <= FLUSH_THRESHOLD[dtype]) & (x != 0)).sum(1, dtype=torch.int32)
    return scaled.clamp(-limit, limit).to(dtype), x.abs().amax(1), saturated, flushed


def record_rows_reference(
    x_lp: Tensor,
    row_amax: Tensor,
    saturated: Tensor,
    flushed: Tensor,
    amax: Tensor,
    counts: Tensor,
    rows: Tensor,
    transposed: bool,
) -> Tensor:
    """Raise a site's amax and counts; return ``x_lp`` [N, D] as [D, N] if ``transposed``, else nothing.

    The second of ``rows``, a tensor on the CPU, is the site's row in ``amax`` and ``counts``.
    """
    row = _get_row(rows)
    amax[row] = torch.maximum(amax[row], row_amax.amax())  # maximum propagates NaN
    counts[row] += torch.stack([saturated.sum(), flushed.sum()])
    return finish_transposed(x_lp, None) if transposed else x_lp.new_empty(0)


def _get_row(rows: Tensor) -> int:
    return int(rows[1])


@jit_unspecialized("length", "n16")
def _record_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_t_ptr, row_amax_ptr, saturated_ptr, flushed_ptr, amax_ptr, counts_ptr, length, width, n16,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Transpose a tile if ``out_t_ptr`` is given; the programs of the first columns record the statistics."""
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    if d0 == 0:
        rows = n0 + tl.arange(0, BLOCK_N)
        mask = rows < length
        record_amax(amax_ptr, abs_bits(tl.load(row_amax_ptr + rows, mask, 0.0)))
        saturated = tl.sum(tl.load(saturated_ptr + rows, mask, 0))
        flushed = tl.sum(tl.load(flushed_ptr + rows, mask, 0))
        tl.atomic_add(counts_ptr, saturated.to(tl.int64), mask=saturated > 0, sem="relaxed")
        tl.atomic_add(counts_ptr + 1, flushed.to(tl.int64), mask=flushed > 0, sem="relaxed")
    if out_t_ptr is not None:
        x0, x1, x2, x3 = load_four(x_ptr, n0, d0, length, width, width, WHOLE, BLOCK_N, BLOCK_D)
        store_words(pack_bytes(x0, x1, x2, x3), out_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)


def _record_rows(
    x_lp: Tensor,
    row_amax: Tensor,
    saturated: Tensor,
    flushed: Tensor,
    amax: Tensor,
    counts: Tensor,
    rows: Tensor,
    transposed: bool,
) -> Tensor:
    if not use_triton(x_lp) or not x_lp.numel():
        return record_rows_reference(x_lp, row_amax, saturated, flushed, amax, counts, rows, transposed)
    row = _get_row(rows)
    length, width = x_lp.shape
    words = allocate_words(x_lp) if transposed else None
    tile = TRANSPOSE_TILE
    if words is None:
        tile = {"BLOCK_N": RECORD_ROWS, "BLOCK_D": 16, "num_warps": 4}
        width = 1  # one program per rows
    launch_kernel(
        _record_kernel,
        tile_grid(length, width, tile),
        *(x_lp.contiguous().view(torch.uint8), words, row_amax, saturated, flushed, amax[row], counts[row]),
        *(length, width, length // 16),
        WHOLE=tiles_evenly(length, width, tile),
        **tile,
    )
    if not transposed:
        return x_lp.new_empty(0)
    return finish_transposed(x_lp, words)


cast_rows = define_op(
    "cast_rows",
    cast_rows_reference,
    lambda x, scale, dtype: (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape[0], dtype=torch.float32),
        x.new_empty(x.shape[0], dtype=torch.int32),
        x.new_empty(x.shape[0], dtype=torch.int32),
    ),
)
record_rows = define_op(
    "record_rows",
    _record_rows,
    lambda x_lp, row_amax, saturated, flushed, amax, counts, rows, transposed: x_lp.new_empty(
        (x_lp.shape[1], x_lp.shape[0]) if transposed else (0,)
    ),
    ("amax", "counts"),
)
