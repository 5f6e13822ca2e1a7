"""The tile that casts, activations and others write: FP8 in both layouts, amax and counts, from four FP32 tiles.

A tile of FP8 in registers runs along D; its transposed copy runs along N. Turning bytes over in shared memory would
take one access a byte, so a program loads four tiles of every fourth row instead: the four values that stand below each
other in the tensor are in one thread, which converts them straight into a 32-bit word. Words go through shared memory
and out in 16-byte stores.

Each layout has conversions of its own, and no byte is ever taken out of a converted pair: ptxas 12.8 and 12.9, which
Triton ships for Hopper, miscompile that (triton #11111, torchao #4652). Seen here on an H200 in the first version of
this file, which shifted converted bytes into words: the row-major copy was right, and the transposed one was strewn
with 0x60 and 0xFC.

Kernels call ``tile_origin``, ``load_rows`` for all they need, compute, and ``emit``; in plain torch the same is
``quantize_reference``.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from narrowgauge.kernels import FP8_MAX, HAVE_TRITON, jit

if HAVE_TRITON:
    import triton.language as tl

    INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

FLUSHED: dict[torch.dtype, float] = {torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}
"""Half the smallest subnormal of each FP8 format: this and everything below becomes 0."""


SATURATED: dict[torch.dtype, float] = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0}
"""Half a step beyond the largest number: up to here it is what rounding gives, and only beyond it something is lost."""


def quantize_reference(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """The cast of ``x`` (any shape), with ``amax`` and ``counts`` updated in place."""
    x = x.float()
    scaled = x * scale
    limit = FP8_MAX[dtype]
    x_lp = scaled.clamp(-limit, limit).to(dtype)
    if x.numel():
        if amax is not None:
            amax.copy_(torch.maximum(amax, x.abs().amax()))  # maximum lets NaN through
        if counts is not None:
            counts[0] += (scaled.abs() > SATURATED[dtype]).sum()
            counts[1] += ((x != 0) & (x_lp.float() == 0)).sum()
    return x_lp


@jit
def record_amax(amax_ptr, bits):  # type: ignore[no-untyped-def]
    """Raise amax to the largest of a tile of |x|, given as bits: they order like the floats, with NaN above inf."""
    raise_amax(amax_ptr, tl.max(bits))


@jit
def raise_amax(amax_ptr, highest):  # type: ignore[no-untyped-def]
    amax_bits_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    # amax only rises, so a value read late costs an atomic at most; it spares nearly all programs theirs.
    tl.atomic_max(amax_bits_ptr, highest, mask=highest > tl.load(amax_bits_ptr), sem="relaxed")


@jit
def _most(LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """``SATURATED`` in a kernel."""
    return 464.0 if LIMIT == 448.0 else 61440.0


@jit
def saturates(size, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where |x * scale| is beyond ``SATURATED``."""
    return size > _most(LIMIT)


@jit
def abs_bits(x):  # type: ignore[no-untyped-def]
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def to_fp8(y, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """FP32 in FP8, rounded to nearest even and saturated: the hardware's conversion does both, and keeps NaN."""
    dtype: tl.constexpr = tl.float8e4nv if LIMIT == 448.0 else tl.float8e5
    if INTERPRETED:  # its conversion wraps around beyond the range
        y = tl.clamp(y, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return y.to(dtype)


@jit
def _byte(x_lp):  # type: ignore[no-untyped-def]
    return x_lp.to(tl.uint8, bitcast=True).to(tl.uint32)


@jit
def pack_bytes(q0, q1, q2, q3):  # type: ignore[no-untyped-def]
    """Four tiles of bytes as one of words. Only for bytes as they come from memory: see above."""
    words = _byte(q0) | (_byte(q1) << 8) | (_byte(q2) << 16) | (_byte(q3) << 24)
    return words.to(tl.int32, bitcast=True)


@jit
def pack_fp8(y0, y1, y2, y3, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four tiles of FP32 as one of words of four FP8 values each."""
    if INTERPRETED:
        return pack_bytes(to_fp8(y0, LIMIT), to_fp8(y1, LIMIT), to_fp8(y2, LIMIT), to_fp8(y3, LIMIT))
    if LIMIT == 448.0:
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
def store_words(words, out_t_ptr, n0, d0, n16, width, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a tile of words, each of rows 4i, 4i + 1, 4i + 2, 4i + 3, transposed.

    ``n16`` is N / 16: written as n16 * 4 words, the length of a row is known to the compiler to allow 16-byte stores.
    """
    columns = n0 // 4 + tl.arange(0, BLOCK_N // 4)
    rows = d0 + tl.arange(0, BLOCK_D)
    target = out_t_ptr + rows[:, None].to(tl.int64) * (n16 * 4) + columns[None, :]
    mask = (rows[:, None] < width) & (columns[None, :] < n16 * 4)
    tl.store(target, tl.trans(words), mask=mask)


@jit
def _nonzero_bytes(words):  # type: ignore[no-untyped-def]
    """128 times the number of values in each word that are not zero: four at a time, in four instructions."""
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
def misfits(y, LIMIT: tl.constexpr, TINY: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many values of a scaled tile saturate, and 2**16 times how many are flushed to zero."""
    flushed = (y != 0.0) & (tl.abs(y) <= TINY)
    return tl.sum(saturates(tl.abs(y), LIMIT).to(tl.int32) | (flushed.to(tl.int32) << 16))


@jit
def add_misfits(counts_ptr, both):  # type: ignore[no-untyped-def]
    saturated = both & 0xFFFF
    flushed = (both >> 16) & 0xFFFF
    tl.atomic_add(counts_ptr, saturated.to(counts_ptr.dtype.element_ty), mask=saturated > 0, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, flushed.to(counts_ptr.dtype.element_ty), mask=flushed > 0, sem="relaxed")


@jit
def _together(top_a, low_a, sum_a, top_b, low_b, sum_b):  # type: ignore[no-untyped-def]
    return tl.maximum(top_a, top_b), tl.minimum(low_a, low_b), sum_a + sum_b


@jit
def _count(  # type: ignore[no-untyped-def]
    words, highest, lowest, scale, counts_ptr, LIMIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Count what was flushed in a tile, or say that this is not the way to count it; and the largest size, as bits.

    Compared one by one, the values would cost as many instructions as a GELU. So zeros are counted in the words, which
    tells what was flushed if there were no zeros to begin with (as at the tensor's edge) and nothing saturates.
    """
    if INTERPRETED:
        return True, tl.max(highest)
    top, low, nonzero = tl.reduce((highest, lowest, _nonzero_bytes(words)), None, _together)  # one wait for all three
    fits = top.to(tl.float32, bitcast=True) * scale <= _most(LIMIT)  # false for NaN
    plain = fits & (low > 0)
    flushed = BLOCK_N * BLOCK_D - nonzero // 128
    tl.atomic_add(counts_ptr + 1, flushed.to(counts_ptr.dtype.element_ty), mask=plain & (flushed > 0), sem="relaxed")
    return not plain, top


@jit
def _put(  # type: ignore[no-untyped-def]
    x, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n, d0, length, width, out_stride,
    LIMIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scale and store one tile of ``emit``, and fold its sizes into ``highest`` and ``lowest``."""
    if amax_ptr is not None or counts_ptr is not None:
        size = abs_bits(x)
        highest = tl.maximum(highest, size)
        if counts_ptr is not None:
            lowest = tl.minimum(lowest, size)
    y = x
    if LIMIT is not None:
        y = x * scale
        q = to_fp8(y, LIMIT)
    else:
        q = x.to(out_ptr.dtype.element_ty)
    rows = (n + 4 * tl.arange(0, BLOCK_N // 4))[:, None]
    columns = (d0 + tl.arange(0, BLOCK_D))[None, :]
    tl.store(out_ptr + rows.to(tl.int64) * out_stride + columns, q, mask=(rows < length) & (columns < width))
    return y, highest, lowest


@jit
def emit(  # type: ignore[no-untyped-def]
    x0, x1, x2, x3, out_ptr, out_t_ptr, scale, amax_ptr, counts_ptr, n0, d0, length, width, out_stride, n16,
    LIMIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write four FP32 tiles (rows n0 + 4i, + 1, + 2, + 3; 0 outside the tensor) in the layouts asked for.

    LIMIT None stores them unscaled, in the format of ``out_ptr``. ``out_t_ptr`` is None or of int32.
    ``amax_ptr`` and ``counts_ptr`` may be None. Returns whether the caller must make the tiles once more and count
    their ``misfits`` one by one, which is hardly ever; kept here for that, they would take half of all registers.
    """
    highest = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.int32)
    lowest = highest + 0x7FFFFFFF
    y0, highest, lowest = _put(
        x0, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n0, d0, length, width, out_stride,
        LIMIT, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y1, highest, lowest = _put(
        x1, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n0 + 1, d0, length, width, out_stride,
        LIMIT, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y2, highest, lowest = _put(
        x2, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n0 + 2, d0, length, width, out_stride,
        LIMIT, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y3, highest, lowest = _put(
        x3, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n0 + 3, d0, length, width, out_stride,
        LIMIT, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    words = 0
    if out_t_ptr is not None or counts_ptr is not None:
        words = pack_fp8(y0, y1, y2, y3, LIMIT)
    if out_t_ptr is not None:
        store_words(words, out_t_ptr, n0, d0, n16, width, BLOCK_N, BLOCK_D)
    again = False
    if counts_ptr is not None:
        again, top = _count(words, highest, lowest, scale, counts_ptr, LIMIT, BLOCK_N, BLOCK_D)
        if amax_ptr is not None:
            raise_amax(amax_ptr, top)
    elif amax_ptr is not None:
        record_amax(amax_ptr, highest)
    return again


@jit
def load_rows(ptr, n, d0, length, width, stride, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of every fourth row from ``n`` on, still in its own format: callers load all four before they compute."""
    rows = (n + 4 * tl.arange(0, BLOCK_N // 4))[:, None]
    columns = (d0 + tl.arange(0, BLOCK_D))[None, :]
    source = ptr + rows.to(tl.int64) * stride + columns
    return tl.load(source, mask=(rows < length) & (columns < width), other=0.0)


@jit
def tile_origin(width, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row and column of this program's tile; neighbouring programs are neighbours along D."""
    across = tl.cdiv(width, BLOCK_D)
    return (tl.program_id(0) // across) * BLOCK_N, (tl.program_id(0) % across) * BLOCK_D
