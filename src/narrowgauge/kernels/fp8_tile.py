"""Device functions that write a tile in FP8 in both layouts, with amax and counts; casts and activations use them.

An FP8 tile in registers runs along D, its transposed copy along N. Transposing bytes in shared memory would take one
access per byte. Instead a program loads four tiles of every fourth row: one thread then has the four values that are
below each other in the tensor, and converts them directly into a 32-bit word. Words go through shared memory and out in
16-byte stores.

Each layout has its own conversions, and no byte is ever extracted from a converted pair: ptxas 12.8 and 12.9, which
Triton ships for Hopper, miscompile that (triton #11111, torchao #4652). The first version of this file shifted
converted bytes into words. On an H200 its row-major copy was right, and the transposed one had stray 0x60 and 0xFC
bytes.

A kernel is launched over ``tile_grid``. It calls ``tile_origin``, ``load_four`` for each input, computes, calls
``store_tiles``, and at the end ``finish_tile_stats``. ``quantize_reference`` does the same in plain torch.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, jit
from narrowgauge.kernels.fp8_formats import (
    FP8_MAX,
    SATURATION_THRESHOLD,
    flush_threshold_of,
    largest_of,
    saturation_threshold_of,
)

if HAVE_TRITON:
    import triton.language as tl

    INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

MAX_GRID_ROWS = 32768
"""Most rows of tiles in the grid's second dimension."""


def quantize_reference(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """Cast ``x`` (any shape), and update ``amax`` and ``counts`` in place."""
    x = x.float()
    scaled = x * scale
    limit = FP8_MAX[dtype]
    x_lp = scaled.clamp(-limit, limit).to(dtype)
    if x.numel():
        if amax is not None:
            amax.copy_(torch.maximum(amax, x.abs().amax()))  # maximum propagates NaN
        if counts is not None:
            counts[0] += (scaled.abs() > SATURATION_THRESHOLD[dtype]).sum()
            counts[1] += ((x != 0) & (x_lp.float() == 0)).sum()
    return x_lp


def tile_grid(length: int, width: int, tile: dict[str, int]) -> tuple[int, int, int]:
    """Return the grid of a kernel with one tile per program; neighbouring programs are neighbours along D.

    CUDA allows 65,535 programs in every dimension but the first, so many rows take two dimensions.
    """
    down = -(-length // tile["BLOCK_N"])
    return -(-width // tile["BLOCK_D"]), min(down, MAX_GRID_ROWS), -(-down // MAX_GRID_ROWS)


def tiles_evenly(length: int, width: int, tile: dict[str, int]) -> bool:
    """Whether no tile reaches beyond the tensor, so that the kernel can be compiled without masks."""
    rows = tile["BLOCK_N"] * (MAX_GRID_ROWS if length > tile["BLOCK_N"] * MAX_GRID_ROWS else 1)
    return length % rows == 0 and width % tile["BLOCK_D"] == 0


@jit
def record_amax(amax_ptr, bits):  # type: ignore[no-untyped-def]
    """Raise amax to the largest of a tile of |x|, given as bits: bits order like floats, with NaN above inf."""
    raise_amax(amax_ptr, tl.max(bits))


@jit
def raise_amax(amax_ptr, highest):  # type: ignore[no-untyped-def]
    amax_bits_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    # amax only rises, so a stale value costs one needless atomic at most. Nearly all programs skip theirs.
    tl.atomic_max(amax_bits_ptr, highest, mask=highest > tl.load(amax_bits_ptr), sem="relaxed")


@jit
def saturates(size, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where |x * scale| is beyond the format's saturation threshold."""
    return size > saturation_threshold_of(FORMAT)


@jit
def abs_bits(x):  # type: ignore[no-untyped-def]
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def to_fp8(y, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert FP32 to FP8, rounding to nearest even and saturating; the hardware does both, and keeps NaN."""
    dtype: tl.constexpr = tl.float8e4nv if FORMAT == "e4m3" else tl.float8e5
    if INTERPRETED:  # the interpreter's conversion wraps around
        limit: tl.constexpr = largest_of(FORMAT)
        y = tl.clamp(y, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return y.to(dtype)


@jit
def _byte(x_lp):  # type: ignore[no-untyped-def]
    return x_lp.to(tl.uint8, bitcast=True).to(tl.uint32)


@jit
def pack_bytes(q0, q1, q2, q3):  # type: ignore[no-untyped-def]
    """Pack four tiles of bytes into one of words. Only for bytes loaded from memory: see the file's docstring."""
    words = _byte(q0) | (_byte(q1) << 8) | (_byte(q2) << 16) | (_byte(q3) << 24)
    return words.to(tl.int32, bitcast=True)


@jit
def pack_fp8(y0, y1, y2, y3, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert four FP32 tiles into one tile of words with four FP8 values each."""
    if INTERPRETED:
        return pack_bytes(to_fp8(y0, FORMAT), to_fp8(y1, FORMAT), to_fp8(y2, FORMAT), to_fp8(y3, FORMAT))
    if FORMAT == "e4m3":
        return tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
            "mov.b32 $0, {lo, hi}; }",
            "=r,f,f,f,f",
            [y0, y1, y2, y3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return tl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1; cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3; "
        "mov.b32 $0, {lo, hi}; }",
        "=r,f,f,f,f",
        [y0, y1, y2, y3],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def store_words(  # type: ignore[no-untyped-def]
    words, out_t_ptr, n0, d0, n16, width,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, length=None,
):  # fmt: skip
    """Store a tile of words transposed; each word has rows 4i, 4i + 1, 4i + 2 and 4i + 3.

    ``n16`` is N / 16. A row length written as n16 * 4 words lets the compiler use 16-byte stores. With ``length``, so
    many rows are stored into columns of a wider tensor, and n16 is that of the wider one.
    """
    columns = tl.arange(0, BLOCK_N // 4)[None, :]
    rows = tl.arange(0, BLOCK_D)[:, None]
    target = out_t_ptr + (d0.to(tl.int64) * (n16 * 4) + n0 // 4) + (rows * (n16 * 4) + columns)
    if WHOLE:
        tl.store(target, tl.trans(words))
    else:
        left = (n16 * 4 if length is None else length // 4) - n0 // 4
        tl.store(target, tl.trans(words), mask=(rows < width - d0) & (columns < left))


@jit
def _nonzero_bytes(words):  # type: ignore[no-untyped-def]
    """Return 128 times the number of nonzero values in each word: four at a time, in four instructions."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; and.b32 t, $1, 0x7F7F7F7F; add.u32 t, t, 0x7F7F7F7F; and.b32 t, t, 0x80808080; "
        "dp4a.u32.u32 $0, t, 0x01010101, 0; }",
        "=r,r",
        [words],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def count_misfits(y, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the values of a scaled tile that saturate, plus 2**16 times those flushed to zero."""
    flushed = (y != 0.0) & (tl.abs(y) <= flush_threshold_of(FORMAT))
    return tl.sum(saturates(tl.abs(y), FORMAT).to(tl.int32) | (flushed.to(tl.int32) << 16))


@jit
def count_misfits_of_rows(y, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return for each row of a scaled tile how many values saturate, and how many are flushed to zero."""
    size = tl.abs(y)
    flushed = (y != 0.0) & (size <= flush_threshold_of(FORMAT))
    return tl.sum(saturates(size, FORMAT).to(tl.int32), 1), tl.sum(flushed.to(tl.int32), 1)


@jit
def add_misfit_counts(counts_ptr, counted):  # type: ignore[no-untyped-def]
    saturated = counted & 0xFFFF
    flushed = (counted >> 16) & 0xFFFF
    tl.atomic_add(counts_ptr, saturated.to(counts_ptr.dtype.element_ty), mask=saturated > 0, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, flushed.to(counts_ptr.dtype.element_ty), mask=flushed > 0, sem="relaxed")


@jit
def _reduce_three(top_a, low_a, sum_a, top_b, low_b, sum_b):  # type: ignore[no-untyped-def]
    return tl.maximum(top_a, top_b), tl.minimum(low_a, low_b), sum_a + sum_b


@jit
def _reduce_two(top_a, sum_a, top_b, sum_b):  # type: ignore[no-untyped-def]
    return tl.maximum(top_a, top_b), sum_a + sum_b


@jit
def init_tile_stats(BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Start values for ``store_tiles``: largest and smallest magnitude as bits, and 128 times the nonzero count."""
    nothing = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.int32)
    return nothing, nothing + 0x7FFFFFFF, nothing


@jit
def finish_tile_stats(  # type: ignore[no-untyped-def]
    highest, lowest, nonzero, values: tl.constexpr, scale, amax_ptr, counts_ptr, FORMAT: tl.constexpr
):
    """Raise amax and count flushed values; or return True if values must be recomputed and counted one by one.

    Comparing every value would cost as many instructions as a GELU. So zeros are counted in the packed words. That is
    the number of flushed values if the input has no zeros (as at the tensor's edge) and nothing saturates. Gradients
    in E5M2 reach down to 2**-33 of their largest: there a zero was a zero before, and the smallest magnitude is not
    needed.
    """
    recount = False
    if counts_ptr is not None:
        if INTERPRETED:
            recount = True
            top = tl.max(highest)
        else:
            if FORMAT == "e4m3":  # one reduction for all three
                top, low, nonzero = tl.reduce((highest, lowest, nonzero), None, _reduce_three)
                plain = low > 0
            else:
                top, nonzero = tl.reduce((highest, nonzero), None, _reduce_two)
                plain = nonzero == values * 128
            plain = plain & (
                top.to(tl.float32, bitcast=True) * scale <= saturation_threshold_of(FORMAT)
            )  # false for NaN
            if FORMAT == "e4m3":
                flushed = values - nonzero // 128
                some = plain & (flushed > 0)
                tl.atomic_add(counts_ptr + 1, flushed.to(counts_ptr.dtype.element_ty), mask=some, sem="relaxed")
            recount = not plain
        if amax_ptr is not None:
            raise_amax(amax_ptr, top)
    elif amax_ptr is not None:
        record_amax(amax_ptr, highest)
    return recount


@jit
def store_rows(  # type: ignore[no-untyped-def]
    x, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n, d0, length, width, out_stride,
    FORMAT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scale and store one tile of ``store_tiles``, and update ``highest`` and ``lowest`` with its magnitudes."""
    if amax_ptr is not None or counts_ptr is not None:
        size = abs_bits(x)
        highest = tl.maximum(highest, size)
        if counts_ptr is not None and FORMAT == "e4m3":
            lowest = tl.minimum(lowest, size)
    y = x
    if FORMAT is not None:
        y = x * scale
        q = to_fp8(y, FORMAT)
    else:
        q = x.to(out_ptr.dtype.element_ty)
    rows = 4 * tl.arange(0, BLOCK_N // 4)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    target = out_ptr + (n.to(tl.int64) * out_stride + d0) + (rows * out_stride + columns)
    if WHOLE:
        tl.store(target, q)
    else:
        tl.store(target, q, mask=(rows < length - n) & (columns < width - d0))
    return y, highest, lowest


@jit
def store_tiles(  # type: ignore[no-untyped-def]
    x0, x1, x2, x3, highest, lowest, nonzero, out_ptr, out_t_ptr, scale, amax_ptr, counts_ptr,
    n0, d0, length, width, out_stride, n16,
    FORMAT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write four FP32 tiles (rows n0 + 4i, + 1, + 2, + 3; 0 outside the tensor) in the requested layouts.

    FORMAT None stores them unscaled, in the format of ``out_ptr``. ``out_t_ptr`` is None or points to int32.
    ``amax_ptr`` and ``counts_ptr`` may be None. Returns the arguments of ``finish_tile_stats``, called after the last
    tile. In the rare case that it returns True, the caller recomputes the tiles and calls ``count_misfits``: keeping
    the tiles for that would take half of all registers.
    """
    y0, highest, lowest = store_rows(
        x0, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n0, d0, length, width, out_stride,
        FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y1, highest, lowest = store_rows(
        x1, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n0 + 1, d0, length, width, out_stride,
        FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y2, highest, lowest = store_rows(
        x2, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n0 + 2, d0, length, width, out_stride,
        FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y3, highest, lowest = store_rows(
        x3, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n0 + 3, d0, length, width, out_stride,
        FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if out_t_ptr is not None or counts_ptr is not None:
        words = pack_fp8(y0, y1, y2, y3, FORMAT)
        if out_t_ptr is not None:
            store_words(words, out_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)
        if counts_ptr is not None and not INTERPRETED:
            nonzero += _nonzero_bytes(words)
    return highest, lowest, nonzero


@jit
def load_rows(  # type: ignore[no-untyped-def]
    ptr, n, d0, length, width, stride, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load a tile of every fourth row from ``n``, in its own format. Callers load all four before they compute.

    The tile's offset is one number for all threads, and a thread's offset within it is the same for every tile.
    Computed the other way round, addresses took an eighth of a GELU's instructions.
    """
    rows = 4 * tl.arange(0, BLOCK_N // 4)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    source = ptr + (n.to(tl.int64) * stride + d0) + (rows * stride + columns)
    if WHOLE:
        x = tl.load(source)
    else:
        x = tl.load(source, mask=(rows < length - n) & (columns < width - d0), other=0.0)
    return x


@jit
def load_four(  # type: ignore[no-untyped-def]
    ptr, n0, d0, length, width, stride, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load the rows of a tile as ``store_tiles`` takes them: 4i, 4i + 1, 4i + 2 and 4i + 3."""
    x0 = load_rows(ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    x1 = load_rows(ptr, n0 + 1, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    x2 = load_rows(ptr, n0 + 2, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    x3 = load_rows(ptr, n0 + 3, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    return x0, x1, x2, x3


@jit
def issue_loads():  # type: ignore[no-untyped-def]
    """Make the compiler issue all loads before this point.

    Otherwise it moves loads to where their values are used, to save registers, and waits for each. On an H200 a GELU's
    gradient takes 0.407 ms that way and 0.392 with all loads first; the gradient of logits in FP8 0.905 and 0.866.
    """
    tl.debug_barrier()


@jit
def to_fp32(x):  # type: ignore[no-untyped-def]
    """Convert BF16 to FP32, two at a time: the compiler would use two instructions for the upper half of a word."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        y = x.to(tl.float32)
    else:
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    return y


@jit
def tile_origin(BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first row and column of this program's tile in a ``tile_grid``."""
    down = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    return down * BLOCK_N, tl.program_id(0) * BLOCK_D
