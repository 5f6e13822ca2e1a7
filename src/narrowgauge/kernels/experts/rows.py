"""Tokens to slots, and back.

    gather_cast    out[s] = FP8(x[token of s] * scale), zeros in empty slots; as [S, D], as [D, S], or both
    sum_slots      out[n] = sum over the k slots s of token n: y[s]

References also take FP32 in place of FP8, without rounding: so the whole function is compared with models' own code.

Each is the other's backward. A token is converted for each of its slots: tokens are fewer, and mostly read from the L2
cache. Bytes moved per element of a slot: one for each layout of ``gather_cast``, 2 for ``sum_slots``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, define_op, jit, jit_unspecialized, use_triton
from narrowgauge.kernels.cast import transpose_reference
from narrowgauge.kernels.experts.slots import Slots
from narrowgauge.kernels.fp8_formats import get_format_name
from narrowgauge.kernels.fp8_tile import (
    add_misfit_counts,
    count_misfits,
    finish_tile_stats,
    init_tile_stats,
    pack_fp8,
    quantize_reference,
    store_tiles,
    store_words,
    tile_grid,
    tile_origin,
    tiles_evenly,
    to_fp32,
)
from narrowgauge.kernels.launch import launch_kernel

if HAVE_TRITON:
    import triton.language as tl

GATHER_TILE: dict[str, int] = {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 4}
SUM_COLUMNS = 1024


def gather_cast(
    x: Tensor,
    slots: Slots,
    scale: Tensor,
    dtype: torch.dtype,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    rows: bool = True,
    transposed: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the tokens ``x`` [N, D] of all slots in FP8, as [S, D] if ``rows``, and as [D, S] if ``transposed``."""
    made, turned = _gather_cast_op(x, slots.pairs, slots.choices, scale, dtype, amax, counts, rows, transposed)
    return made if rows else None, turned if transposed else None


def sum_slots(y: Tensor, slots: Slots, dtype: torch.dtype) -> Tensor:
    """Return for each token the sum of its slots of ``y`` [S, D], computed in FP32, as [N, D] in ``dtype``."""
    return _sum_slots_op(y, slots.of_pairs, dtype)


def round_reference(x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None) -> Tensor:
    """Cast as ``quantize_reference`` does; FP32 is not rounded, for comparisons."""
    return x.float() * scale if dtype is torch.float32 else quantize_reference(x, scale, dtype, amax, counts)


def turn_reference(x: Tensor) -> Tensor:
    return transpose_reference(x) if x.element_size() == 1 else x.t().contiguous()


def gather_reference(x: Tensor, pairs: Tensor, choices: int) -> Tensor:
    """Return the token of each slot, zeros in empty slots."""
    tokens = pairs.clamp(min=0).long() // choices
    return torch.where((pairs >= 0)[:, None], x[tokens], 0.0) if len(x) else x.new_zeros(len(pairs), x.shape[1])


def sum_slots_reference(y: Tensor, of_pairs: Tensor, dtype: torch.dtype) -> Tensor:
    return y[of_pairs.long()].float().sum(1).to(dtype)


@jit
def load_gathered(  # type: ignore[no-untyped-def]
    ptr, pairs_ptr, n, d0, width, stride,
    CHOICES: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load the tokens of every fourth slot from ``n``."""
    pairs = tl.load(pairs_ptr + n + 4 * tl.arange(0, BLOCK_N // 4))
    columns = d0 + tl.arange(0, BLOCK_D)[None, :]
    source = ptr + (pairs // CHOICES).to(tl.int64)[:, None] * stride + columns
    present = (pairs >= 0)[:, None]
    return tl.load(source, mask=present if WHOLE else present & (columns < width), other=0.0)


@jit_unspecialized("length", "n16")
def _gather_cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr, pairs_ptr, out_ptr, out_t_ptr, scale_ptr, amax_ptr, counts_ptr, length, width, stride, n16,
    CHOICES: tl.constexpr, FORMAT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    x0 = load_gathered(x_ptr, pairs_ptr, n0, d0, width, stride, CHOICES, WHOLE, BLOCK_N, BLOCK_D)
    x1 = load_gathered(x_ptr, pairs_ptr, n0 + 1, d0, width, stride, CHOICES, WHOLE, BLOCK_N, BLOCK_D)
    x2 = load_gathered(x_ptr, pairs_ptr, n0 + 2, d0, width, stride, CHOICES, WHOLE, BLOCK_N, BLOCK_D)
    x3 = load_gathered(x_ptr, pairs_ptr, n0 + 3, d0, width, stride, CHOICES, WHOLE, BLOCK_N, BLOCK_D)
    scale = tl.load(scale_ptr)
    if out_ptr is None:
        words = pack_fp8(
            to_fp32(x0) * scale, to_fp32(x1) * scale, to_fp32(x2) * scale, to_fp32(x3) * scale, FORMAT
        )  # fmt: skip
        store_words(words, out_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)
    else:
        highest, lowest, nonzero = init_tile_stats(BLOCK_N, BLOCK_D)
        highest, lowest, nonzero = store_tiles(
            to_fp32(x0), to_fp32(x1), to_fp32(x2), to_fp32(x3), highest, lowest, nonzero, out_ptr, out_t_ptr, scale,
            amax_ptr, counts_ptr, n0, d0, length, width, width, n16, FORMAT, WHOLE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        recount = finish_tile_stats(highest, lowest, nonzero, BLOCK_N * BLOCK_D, scale, amax_ptr, counts_ptr, FORMAT)
        if counts_ptr is not None:  # noqa: SIM102 (decided when the kernel is compiled)
            if recount:
                counted = 0
                for i in range(4):
                    x = load_gathered(x_ptr, pairs_ptr, n0 + i, d0, width, stride, CHOICES, WHOLE, BLOCK_N, BLOCK_D)
                    counted += count_misfits(to_fp32(x) * scale, FORMAT)
                add_misfit_counts(counts_ptr, counted)


@jit
def _sum_slots_kernel(  # type: ignore[no-untyped-def]
    y_ptr, slots_ptr, out_ptr, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        slot = tl.load(slots_ptr + token * CHOICES + choice).to(tl.int64)
        total += tl.load(y_ptr + slot * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + columns, total.to(out_ptr.dtype.element_ty), mask=columns < width)


def _gather_cast(
    x: Tensor,
    pairs: Tensor,
    choices: int,
    scale: Tensor,
    dtype: torch.dtype,
    amax: Tensor | None,
    counts: Tensor | None,
    rows: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    length, width = len(pairs), x.shape[1]
    nothing = torch.empty(0, dtype=dtype, device=x.device)
    if not use_triton(x) or dtype is torch.float32:
        made = round_reference(gather_reference(x, pairs, choices), scale, dtype, amax, counts)
        return made if rows else nothing, turn_reference(made) if transposed else nothing
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((length, width), dtype=dtype, device=x.device) if rows else None
    words = torch.empty((width, length // 4), dtype=torch.int32, device=x.device) if transposed else None
    launch_kernel(
        _gather_cast_kernel, tile_grid(length, width, GATHER_TILE),
        x, pairs, out, words, scale, amax, counts, length, width, x.stride(0), length // 16,
        CHOICES=choices, FORMAT=get_format_name(dtype), WHOLE=tiles_evenly(length, width, GATHER_TILE), **GATHER_TILE,
    )  # fmt: skip
    return nothing if out is None else out, nothing if words is None else words.view(dtype)


def _sum_slots(y: Tensor, of_pairs: Tensor, dtype: torch.dtype) -> Tensor:
    if not use_triton(y) or y.dtype is torch.float32:
        return sum_slots_reference(y, of_pairs, dtype)
    tokens, choices = of_pairs.shape
    width = y.shape[1]
    out = torch.empty((tokens, width), dtype=dtype, device=y.device)
    if tokens:
        grid = tokens, -(-width // SUM_COLUMNS)
        launch_kernel(_sum_slots_kernel, grid, y, of_pairs, out, width, CHOICES=choices, BLOCK=SUM_COLUMNS, num_warps=4)
    return out


def _fake_gathered(
    x: Tensor, pairs: Tensor, choices: int, scale: Tensor, dtype: torch.dtype, amax: Tensor | None,
    counts: Tensor | None, rows: bool, transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = len(pairs), x.shape[1]
    return (
        x.new_empty(shape if rows else (0,), dtype=dtype),
        x.new_empty(shape[::-1] if transposed else (0,), dtype=dtype),
    )


_gather_cast_op = define_op("gather_cast", _gather_cast, _fake_gathered, ("amax", "counts"))
_sum_slots_op = define_op(
    "sum_slots", _sum_slots, lambda y, of_pairs, dtype: y.new_empty((len(of_pairs), y.shape[1]), dtype=dtype)
)
