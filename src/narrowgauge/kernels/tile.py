"""The tile that casts, activations and others write: FP8 in both layouts, amax and counts, from four FP32 tiles.

A tile of FP8 in registers runs along D; its transposed copy runs along N. Turning bytes over in shared memory would
take one access a byte, so a program loads four tiles of every fourth row instead: the four bytes that stand below each
other in the tensor are in one thread, which packs them into a 32-bit word. Words go through shared memory and out in
16-byte stores, and no FP8 value is ever transposed by the compiler (torchao #4652 was such a miscompilation).

Kernels call ``tile_origin``, ``load_rows`` for all they need, compute, and ``emit``; in plain torch the same is
``quantize_reference``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.kernels import FP8_MAX, HAVE_TRITON, jit

if HAVE_TRITON:
    import triton.language as tl

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
    highest = tl.max(bits)
    amax_bits_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    # amax only rises, so a value read late costs an atomic at most; it spares nearly all programs theirs.
    tl.atomic_max(amax_bits_ptr, highest, mask=highest > tl.load(amax_bits_ptr), sem="relaxed")


@jit
def saturates(size, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where |x * scale| is beyond ``SATURATED``."""
    return size > (464.0 if LIMIT == 448.0 else 61440.0)


@jit
def abs_bits(x):  # type: ignore[no-untyped-def]
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _byte(x_lp):  # type: ignore[no-untyped-def]
    return x_lp.to(tl.uint8, bitcast=True).to(tl.uint32)


@jit
def store_words(q0, q1, q2, q3, out_t_ptr, n0, d0, n16, width, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store four tiles of 8-bit values, rows 4i, 4i + 1, 4i + 2, 4i + 3, transposed, as words of four rows each.

    ``n16`` is N / 16: written as n16 * 4 words, the length of a row is known to the compiler to allow 16-byte stores.
    """
    words = _byte(q0) | (_byte(q1) << 8) | (_byte(q2) << 16) | (_byte(q3) << 24)
    columns = n0 // 4 + tl.arange(0, BLOCK_N // 4)
    rows = d0 + tl.arange(0, BLOCK_D)
    target = out_t_ptr + rows[:, None].to(tl.int64) * (n16 * 4) + columns[None, :]
    mask = (rows[:, None] < width) & (columns[None, :] < n16 * 4)
    tl.store(target, tl.trans(words.to(tl.int32, bitcast=True)), mask=mask)


@jit
def _put(  # type: ignore[no-untyped-def]
    x, highest, misfits, out_ptr, scale, amax_ptr, counts_ptr, n, d0, length, width, out_stride,
    LIMIT: tl.constexpr, TINY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Quantize and store one tile of ``emit``, and fold its statistics into ``highest`` and ``misfits``.

    ``misfits`` has 1 for a value that saturates and 8 for one that is flushed to zero. It is FP32, as LLVM would gather
    integer sums at the end and keep every term in a register till then.
    """
    if amax_ptr is not None:
        highest = tl.maximum(highest, abs_bits(x))
    if LIMIT is not None:
        y = x * scale
        if counts_ptr is not None:
            misfits = tl.where(saturates(tl.abs(y), LIMIT), misfits + 1.0, misfits)
            misfits = tl.where((x != 0.0) & (tl.abs(y) <= TINY), misfits + 8.0, misfits)
        x = tl.clamp(y, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    q = x.to(out_ptr.dtype.element_ty)
    rows = (n + 4 * tl.arange(0, BLOCK_N // 4))[:, None]
    columns = (d0 + tl.arange(0, BLOCK_D))[None, :]
    tl.store(out_ptr + rows.to(tl.int64) * out_stride + columns, q, mask=(rows < length) & (columns < width))
    return q, highest, misfits


@jit
def emit(  # type: ignore[no-untyped-def]
    x0, x1, x2, x3, out_ptr, out_t_ptr, scale, amax_ptr, counts_ptr, n0, d0, length, width, out_stride, n16,
    LIMIT: tl.constexpr, TINY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write four FP32 tiles (rows n0 + 4i, + 1, + 2, + 3; 0 outside the tensor) in the layouts asked for.

    LIMIT None stores them unscaled. ``out_t_ptr`` is None, or of int32 (N a multiple of 16), or of the FP8 format.
    ``amax_ptr`` and ``counts_ptr`` may be None. Statistics are reduced last: that waits for all warps, stores need not.
    """
    none = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.float32)
    q0, highest, misfits = _put(
        x0, none.to(tl.int32), none, out_ptr, scale, amax_ptr, counts_ptr, n0, d0, length, width, out_stride,
        LIMIT, TINY, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    q1, highest, misfits = _put(
        x1, highest, misfits, out_ptr, scale, amax_ptr, counts_ptr, n0 + 1, d0, length, width, out_stride,
        LIMIT, TINY, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    q2, highest, misfits = _put(
        x2, highest, misfits, out_ptr, scale, amax_ptr, counts_ptr, n0 + 2, d0, length, width, out_stride,
        LIMIT, TINY, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    q3, highest, misfits = _put(
        x3, highest, misfits, out_ptr, scale, amax_ptr, counts_ptr, n0 + 3, d0, length, width, out_stride,
        LIMIT, TINY, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if out_t_ptr is not None:
        if out_t_ptr.dtype.element_ty == tl.int32:
            store_words(q0, q1, q2, q3, out_t_ptr, n0, d0, n16, width, BLOCK_N, BLOCK_D)
        else:  # rows of the copy start at any byte: right, but byte by byte
            rows = (n0 + 4 * tl.arange(0, BLOCK_N // 4))[:, None]
            columns = (d0 + tl.arange(0, BLOCK_D))[None, :]
            target = out_t_ptr + columns.to(tl.int64) * length + rows
            tl.store(target, q0, mask=(columns < width) & (rows < length))
            tl.store(target + 1, q1, mask=(columns < width) & (rows + 1 < length))
            tl.store(target + 2, q2, mask=(columns < width) & (rows + 2 < length))
            tl.store(target + 3, q3, mask=(columns < width) & (rows + 3 < length))
    if amax_ptr is not None:
        record_amax(amax_ptr, highest)
    if counts_ptr is not None:
        each = misfits.to(tl.int32)
        both = tl.sum((each & 7) | ((each >> 3) << 16))
        saturated = both & 0xFFFF
        flushed = (both >> 16) & 0xFFFF
        tl.atomic_add(counts_ptr, saturated.to(counts_ptr.dtype.element_ty), mask=saturated > 0, sem="relaxed")
        tl.atomic_add(counts_ptr + 1, flushed.to(counts_ptr.dtype.element_ty), mask=flushed > 0, sem="relaxed")


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
