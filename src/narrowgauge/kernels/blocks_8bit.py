"""A matrix in 8 bits, with one scale for blocks of 4 rows and 16 columns: how pre-activations are kept for backward.

    scale = max |x| / 127, rounded up to BF16        code = round(x / scale) + 128, from 1 to 255

Integers have equal steps, so the error is at most half a step, 1/254 of the largest of 64 values: 44 dB for normally
distributed values. E4M3 with the same scales has 31.5 dB, because its steps grow with the values.

A block with inf or NaN has a scale that is not finite, and is read back as values that are not finite. Values so small
that the scale's reciprocal would overflow become 0.

In kernels, a thread has 8 columns of four rows that are below each other (``fp8_tile``). So nearly all of a block's
maximum is found in one thread, and one scale serves 32 of its values; scales of single rows would take four reductions,
four reciprocals and four passes through shared memory. Adding 2**23 + 128 to a number puts it, rounded, into the lowest
byte, in one instruction. ``bytes | 2**23`` as a float, minus the same number, reads it back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, jit
from narrowgauge.kernels.fp8_tile import abs_bits, to_fp32

if HAVE_TRITON:
    import triton.language as tl

    from narrowgauge.kernels.fp8_tile import INTERPRETED

ROWS, COLUMNS = 4, 16
"""The size of a block."""
TILE_COLUMNS = 64
"""Scales are stored for so many columns at a time, the width of a kernel's tile: those of a tile are neighbours."""
ROOM = (1.0 + 2.0**-7) / 127.0
"""Times the largest value this is a scale that, rounded to BF16, still covers it."""
SMALLEST = 1e-36
"""Smaller scales have no finite reciprocal that is safe to multiply with."""
ZERO = 128
"""The code of 0."""


class Blocks8(NamedTuple):
    """A matrix [N, D] in 8 bits."""

    codes: Tensor
    """[N, D], uint8."""
    scales: Tensor
    """[ceil(D / 64), ceil(N / 4), 4], BF16."""

    def decode(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the matrix in a wider format."""
        return decode_reference(self.codes, self.scales).to(dtype)


def allocate(like: Tensor) -> Blocks8:
    """Return codes and scales for a matrix, not yet written."""
    (length, width), device = like.shape, like.device
    across = -(-width // TILE_COLUMNS)
    scales = torch.empty((across, -(-length // ROWS), TILE_COLUMNS // COLUMNS), dtype=torch.bfloat16, device=device)
    return Blocks8(torch.empty((length, width), dtype=torch.uint8, device=device), scales)


def encode_reference(x: Tensor) -> Blocks8:
    """Encode a matrix in plain torch."""
    length, width = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -width % TILE_COLUMNS, 0, -length % ROWS))
    blocks = padded.view(len(padded) // ROWS, ROWS, -1, COLUMNS)
    scales = (blocks.abs().amax((1, 3)) * ROOM).to(torch.bfloat16)
    wide = scales.float()
    inverse = torch.where(wide >= SMALLEST, 1.0 / wide, 0.0)
    inverse = torch.where(wide.isfinite(), inverse, 0.0)
    rounded = torch.round(blocks.nan_to_num(0.0, 0.0, 0.0) * inverse[:, None, :, None])
    codes = (rounded + ZERO).to(torch.uint8).view(padded.shape)[:length, :width]
    by_tile = scales.view(len(scales), -1, TILE_COLUMNS // COLUMNS).transpose(0, 1)
    return Blocks8(codes.contiguous(), by_tile.contiguous())


def decode_reference(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix in FP32, in plain torch."""
    length, width = codes.shape
    wide = scales.transpose(0, 1).flatten(1).float()
    wide = wide.repeat_interleave(ROWS, 0)[:length].repeat_interleave(COLUMNS, 1)[:, :width]
    return (codes.float() - ZERO) * wide


@jit
def _larger_size(x, y):  # type: ignore[no-untyped-def]
    """Return the larger of |x| and |y|, with any sign; NaN if one is NaN. Two BF16 numbers take one instruction."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return tl.maximum(tl.abs(x), tl.abs(y), propagate_nan=tl.PropagateNan.ALL)
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@jit
def _encode(x, inverse):  # type: ignore[no-untyped-def]
    """Return codes: x times the inverse scale, rounded, in the lowest byte. Four BF16 numbers are packed at a time."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return ((to_fp32(x) * inverse + 8388736.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        shl.b32 a, $1, 16;
        and.b32 b, $1, 0xFFFF0000;
        shl.b32 c, $2, 16;
        and.b32 d, $2, 0xFFFF0000;
        fma.rn.f32 a, a, $3, 0f4B000080;
        fma.rn.f32 b, b, $4, 0f4B000080;
        fma.rn.f32 c, c, $5, 0f4B000080;
        fma.rn.f32 d, d, $6, 0f4B000080;
        prmt.b32 a, a, b, 0x0040;
        prmt.b32 c, c, d, 0x0040;
        prmt.b32 $0, a, c, 0x5410;
        }""",
        "=r,r,r,r,r,r,r", [x, inverse], dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@jit
def _spread(values, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Repeat a number for each block [ROWS, 4] over the columns of a tile of every fourth row [ROWS, 64]."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], [ROWS, 4, 16]), [ROWS, 64])


@jit
def _locate_scales(scales_ptr, n0, d0, length, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the places of a tile's scales [BLOCK_N / 4, 4], and which of them exist."""
    rows = n0 // 4 + tl.arange(0, BLOCK_N // 4)
    there = (length + 3) // 4
    first = (d0 // 64).to(tl.int64) * there
    return scales_ptr + (first + rows)[:, None] * 4 + tl.arange(0, 4)[None, :], (rows < there)[:, None]


@jit
def store_codes(  # type: ignore[no-untyped-def]
    x0, x1, x2, x3, codes_ptr, scales_ptr, n0, d0, length, width, stride,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store a tile in 8 bits, given as ``load_four`` loads it; 0 outside the tensor."""
    tl.static_assert(BLOCK_D == 64)
    top = _larger_size(_larger_size(x0, x1), _larger_size(x2, x3))
    top = tl.reshape(abs_bits(to_fp32(top)), [BLOCK_N // 4, 4, 16])  # as bits, NaN is the largest
    scale = (tl.max(top, 2).to(tl.float32, bitcast=True) * 0.007935531496062992).to(tl.bfloat16)  # ROOM
    wide = scale.to(tl.float32)
    inverse = _spread(tl.where(wide >= 1e-36, 1.0 / wide, 0.0), BLOCK_N // 4)
    places, exist = _locate_scales(scales_ptr, n0, d0, length, BLOCK_N)
    if WHOLE:
        tl.store(places, scale)
    else:
        tl.store(places, scale, mask=exist)
    _store_tile(_encode(x0, inverse), codes_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    _store_tile(_encode(x1, inverse), codes_ptr, n0 + 1, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    _store_tile(_encode(x2, inverse), codes_ptr, n0 + 2, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    _store_tile(_encode(x3, inverse), codes_ptr, n0 + 3, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)


@jit
def _store_tile(  # type: ignore[no-untyped-def]
    codes, codes_ptr, n, d0, length, width, stride,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store every fourth row from ``n``."""
    rows = 4 * tl.arange(0, BLOCK_N // 4)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    target = codes_ptr + (n.to(tl.int64) * stride + d0) + (rows * stride + columns)
    if WHOLE:
        tl.store(target, codes)
    else:
        tl.store(target, codes, mask=(rows < length - n) & (columns < width - d0))


@jit
def load_scales(  # type: ignore[no-untyped-def]
    scales_ptr, n0, d0, length, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Load the scales of a tile, for each column of every fourth row; 0 outside the tensor."""
    places, exist = _locate_scales(scales_ptr, n0, d0, length, BLOCK_N)
    if WHOLE:
        scales = tl.load(places)
    else:
        scales = tl.load(places, mask=exist, other=0.0)
    return _spread(scales.to(tl.float32), BLOCK_N // 4)


@jit
def decode_codes(codes, scales):  # type: ignore[no-untyped-def]
    """Return every fourth row of a tile in FP32, from its codes and from ``load_scales``."""
    shifted = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return (shifted - 8388736.0) * scales
