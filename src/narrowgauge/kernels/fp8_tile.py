"""The tile that casts, activations and others write: FP8 in both layouts, amax and counts, from four FP32 tiles.

A tile of FP8 in registers runs along D; its transposed copy runs along N. Turning bytes over in shared memory would
take one access a byte, so a program loads four tiles of every fourth row instead: the four values that stand below each
other in the tensor are in one thread, which converts them straight into a 32-bit word. Words go through shared memory
and out in 16-byte stores.

Each layout has conversions of its own, and no byte is ever taken out of a converted pair: ptxas 12.8 and 12.9, which
Triton ships for Hopper, miscompile that (triton #11111, torchao #4652). Seen here on an H200 in the first version of
this file, which shifted converted bytes into words: the row-major copy was right, and the transposed one was strewn
with 0x60 and 0xFC.

Kernels are launched over ``tiles``; they call ``tile_origin``, ``load_four`` for all they need, compute, ``emit``, and
in the end ``settle``. In plain torch the same is ``quantize_reference``.
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


MOST_DOWN = 32768
"""Tiles below each other that a grid holds in its second direction."""


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


def tiles(length: int, width: int, tile: dict[str, int]) -> tuple[int, int, int]:
    """The grid of a kernel that takes one tile a program; neighbouring programs are neighbours along D.

    CUDA allows 65,535 programs in all directions but the first, so that many rows take two of them.
    """
    down = -(-length // tile["BLOCK_N"])
    return -(-width // tile["BLOCK_D"]), min(down, MOST_DOWN), -(-down // MOST_DOWN)


def whole(length: int, width: int, tile: dict[str, int]) -> bool:
    """Whether no tile reaches beyond the tensor: then a kernel is compiled without all that looks after the edges."""
    rows = tile["BLOCK_N"] * (MOST_DOWN if length > tile["BLOCK_N"] * MOST_DOWN else 1)
    return length % rows == 0 and width % tile["BLOCK_D"] == 0


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
def store_words(  # type: ignore[no-untyped-def]
    words, out_t_ptr, n0, d0, n16, width,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store a tile of words, each of rows 4i, 4i + 1, 4i + 2, 4i + 3, transposed.

    ``n16`` is N / 16: written as n16 * 4 words, the length of a row is known to the compiler to allow 16-byte stores.
    """
    columns = tl.arange(0, BLOCK_N // 4)[None, :]
    rows = tl.arange(0, BLOCK_D)[:, None]
    target = out_t_ptr + (d0.to(tl.int64) * (n16 * 4) + n0 // 4) + (rows * (n16 * 4) + columns)
    if WHOLE:
        tl.store(target, tl.trans(words))
    else:
        tl.store(target, tl.trans(words), mask=(rows < width - d0) & (columns < n16 * 4 - n0 // 4))


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
def _both(top_a, sum_a, top_b, sum_b):  # type: ignore[no-untyped-def]
    return tl.maximum(top_a, top_b), sum_a + sum_b


@jit
def unseen(BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """What ``emit`` adds to: the largest and the smallest size as bits, and 128 times how many values are not zero."""
    nothing = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.int32)
    return nothing, nothing + 0x7FFFFFFF, nothing


@jit
def settle(highest, lowest, nonzero, values: tl.constexpr, scale, amax_ptr, counts_ptr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Raise amax, and count what was flushed; or say that the values must be made again to be counted one by one.

    Compared one by one, they would cost as many instructions as a GELU. So zeros are counted in the words, which tells
    what was flushed if there were no zeros to begin with (as at the tensor's edge) and nothing saturates. Gradients in
    E5M2 reach down to 2**-33 of their largest: there a zero is a zero, and the smallest size need not be known.
    """
    again = False
    if counts_ptr is not None:
        if INTERPRETED:
            again = True
            top = tl.max(highest)
        else:
            if LIMIT == 448.0:  # one wait for all three
                top, low, nonzero = tl.reduce((highest, lowest, nonzero), None, _together)
                plain = low > 0
            else:
                top, nonzero = tl.reduce((highest, nonzero), None, _both)
                plain = nonzero == values * 128
            plain = plain & (top.to(tl.float32, bitcast=True) * scale <= _most(LIMIT))  # false for NaN
            if LIMIT == 448.0:
                flushed = values - nonzero // 128
                some = plain & (flushed > 0)
                tl.atomic_add(counts_ptr + 1, flushed.to(counts_ptr.dtype.element_ty), mask=some, sem="relaxed")
            again = not plain
        if amax_ptr is not None:
            raise_amax(amax_ptr, top)
    elif amax_ptr is not None:
        record_amax(amax_ptr, highest)
    return again


@jit
def _put(  # type: ignore[no-untyped-def]
    x, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n, d0, length, width, out_stride,
    LIMIT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scale and store one tile of ``emit``, and fold its sizes into ``highest`` and ``lowest``."""
    if amax_ptr is not None or counts_ptr is not None:
        size = abs_bits(x)
        highest = tl.maximum(highest, size)
        if counts_ptr is not None and LIMIT == 448.0:
            lowest = tl.minimum(lowest, size)
    y = x
    if LIMIT is not None:
        y = x * scale
        q = to_fp8(y, LIMIT)
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
def emit(  # type: ignore[no-untyped-def]
    x0, x1, x2, x3, highest, lowest, nonzero, out_ptr, out_t_ptr, scale, amax_ptr, counts_ptr,
    n0, d0, length, width, out_stride, n16,
    LIMIT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write four FP32 tiles (rows n0 + 4i, + 1, + 2, + 3; 0 outside the tensor) in the layouts asked for.

    LIMIT None stores them unscaled, in the format of ``out_ptr``. ``out_t_ptr`` is None or of int32.
    ``amax_ptr`` and ``counts_ptr`` may be None. Returns what ``settle`` is to be told after the last tile; where that
    says so, which is hardly ever, the caller makes the tiles once more and counts their ``misfits`` one by one: kept
    here for it, they would take half of all registers.
    """
    y0, highest, lowest = _put(
        x0, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n0, d0, length, width, out_stride,
        LIMIT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y1, highest, lowest = _put(
        x1, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n0 + 1, d0, length, width, out_stride,
        LIMIT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y2, highest, lowest = _put(
        x2, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n0 + 2, d0, length, width, out_stride,
        LIMIT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y3, highest, lowest = _put(
        x3, highest, lowest, out_ptr, scale, amax_ptr, counts_ptr, n0 + 3, d0, length, width, out_stride,
        LIMIT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if out_t_ptr is not None or counts_ptr is not None:
        words = pack_fp8(y0, y1, y2, y3, LIMIT)
        if out_t_ptr is not None:
            store_words(words, out_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)
        if counts_ptr is not None and not INTERPRETED:
            nonzero += _nonzero_bytes(words)
    return highest, lowest, nonzero


@jit
def load_rows(  # type: ignore[no-untyped-def]
    ptr, n, d0, length, width, stride, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """A tile of every fourth row from ``n`` on, still in its own format: callers load all four before they compute.

    The tile's place is one number for all threads, and a thread's place in it the same for every tile: computed the
    other way round, addresses took an eighth of a GELU's instructions.
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
    """The rows of a tile as ``emit`` takes them: 4i, 4i + 1, 4i + 2 and 4i + 3."""
    x0 = load_rows(ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    x1 = load_rows(ptr, n0 + 1, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    x2 = load_rows(ptr, n0 + 2, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    x3 = load_rows(ptr, n0 + 3, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    return x0, x1, x2, x3


@jit
def under_way():  # type: ignore[no-untyped-def]
    """After this, all loads before it are on their way.

    Left alone, the compiler puts loads where their values are used, to spare registers, and then waits for each: on an
    H200 a GELU's gradient takes 0.407 ms so and 0.392 with all loads first, that of logits in FP8 0.905 and 0.866.
    """
    tl.debug_barrier()


@jit
def widen(x):  # type: ignore[no-untyped-def]
    """BF16 in FP32, two at a time: on its own, the upper half of a word takes the compiler two instructions."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        y = x.to(tl.float32)
    else:
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    return y


@jit
def tile_origin(BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row and column of this program's tile in a grid by ``tiles``."""
    down = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    return down * BLOCK_N, tl.program_id(0) * BLOCK_D
