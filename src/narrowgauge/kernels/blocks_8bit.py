"""A matrix in 8 bits, with one scale for blocks of 4 rows and 16 columns: how pre-activations are kept for backward.

    scale = max |x| / 128, rounded up to BF16        code = floor(x / scale) + 128        value = (code - 127.5) scale

Steps are equal, and values are in their middle, so the error is at most half a step, 1/256 of the largest of 64 values:
44 dB for normally distributed values. E4M3 with the same scales has 31.5 dB, because its steps grow with the values.
Signs are kept, so the slope of a ReLU is exact, and no value is 0: the gradient kernels count zeros one by one, which
takes half as long again as the rest of a SwiGLU's gradient.

A block with inf or NaN has a scale that is not finite, and is read back as values that are not finite. A block whose
scale has no safe reciprocal is read back as half its scale; a block of zeros as zeros.

In kernels, a thread has 8 columns of four rows that are below each other (``fp8_tile``). So nearly all of a block's
maximum is found in one thread, and one scale serves 32 of its values; scales of single rows would take four reductions,
four reciprocals and four passes through shared memory. Adding 2**23 + 128 to a number, rounding down, puts it into the
lowest byte, in one instruction. To read it back, the byte is put into the middle of the bits of 2**15 + 1/2.

Codes are stored 64 columns at a time, the width of a kernel's tile, so that a tile is contiguous.
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
"""Codes and scales are stored for so many columns at a time, the width of a kernel's tile."""
ROOM = (1.0 + 2.0**-7) / 128.0
"""Times the largest value this is a scale that, rounded to BF16, still covers it."""
SMALLEST = 1e-36
"""Smaller scales have no finite reciprocal that is safe to multiply with."""
ZERO = 128
"""The code of 0 and of what is a little larger."""


class Blocks8(NamedTuple):
    """A matrix [N, D] in 8 bits."""

    codes: Tensor
    """[ceil(D / 64), N, 64], uint8."""
    scales: Tensor
    """[ceil(D / 64), ceil(N / 4), 4], BF16."""
    width: int
    """D."""

    def decode(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the matrix in a wider format."""
        return decode_reference(self.codes, self.scales, self.width).to(dtype)


def allocate(like: Tensor) -> Blocks8:
    """Return codes and scales for a matrix, not yet written."""
    (length, width), device = like.shape, like.device
    across = -(-width // TILE_COLUMNS)
    scales = torch.empty((across, -(-length // ROWS), TILE_COLUMNS // COLUMNS), dtype=torch.bfloat16, device=device)
    return Blocks8(torch.empty((across, length, TILE_COLUMNS), dtype=torch.uint8, device=device), scales, width)


def encode_reference(x: Tensor) -> Blocks8:
    """Encode a matrix in plain torch."""
    length, width = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -width % TILE_COLUMNS, 0, -length % ROWS))
    blocks = padded.view(len(padded) // ROWS, ROWS, -1, COLUMNS)
    scales = (blocks.abs().amax((1, 3)) * ROOM).to(torch.bfloat16)
    wide = scales.float()
    inverse = torch.where(wide >= SMALLEST, 1.0 / wide, 0.0)
    inverse = torch.where(wide.isfinite(), inverse, 0.0)
    steps = torch.floor(blocks.nan_to_num(0.0, 0.0, 0.0) * inverse[:, None, :, None])
    codes = (steps + ZERO).to(torch.uint8).view(padded.shape)[:length]
    return Blocks8(_cut(codes, TILE_COLUMNS), _cut(scales, TILE_COLUMNS // COLUMNS), width)


def _cut(x: Tensor, columns: int) -> Tensor:
    """Store a matrix so many columns at a time."""
    return x.view(len(x), -1, columns).transpose(0, 1).contiguous()


def decode_reference(codes: Tensor, scales: Tensor, width: int) -> Tensor:
    """Return the matrix in FP32, in plain torch."""
    length = codes.shape[1]
    wide = scales.transpose(0, 1).flatten(1).float()
    wide = wide.repeat_interleave(ROWS, 0)[:length].repeat_interleave(COLUMNS, 1)
    return ((codes.transpose(0, 1).flatten(1).float() - (ZERO - 0.5)) * wide)[:, :width]


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
    """Return codes: x times the inverse scale, rounded down, as bytes. Four BF16 numbers are packed at a time."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return (tl.floor(to_fp32(x) * inverse).to(tl.int32) + 128).to(tl.uint8)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        shl.b32 a, $1, 16;
        and.b32 b, $1, 0xFFFF0000;
        shl.b32 c, $2, 16;
        and.b32 d, $2, 0xFFFF0000;
        fma.rm.f32 a, a, $3, 0f4B000080;
        fma.rm.f32 b, b, $4, 0f4B000080;
        fma.rm.f32 c, c, $5, 0f4B000080;
        fma.rm.f32 d, d, $6, 0f4B000080;
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
    x0, x1, x2, x3, codes_ptr, scales_ptr, n0, d0, length,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store a tile in 8 bits, given as ``load_four`` loads it; 0 outside the tensor."""
    tl.static_assert(BLOCK_D == 64)
    top = _larger_size(_larger_size(x0, x1), _larger_size(x2, x3))
    top = tl.reshape(abs_bits(to_fp32(top)), [BLOCK_N // 4, 4, 16])  # as bits, NaN is the largest
    scale = (tl.max(top, 2).to(tl.float32, bitcast=True) * 0.00787353515625).to(tl.bfloat16)  # ROOM
    wide = scale.to(tl.float32)
    inverse = _spread(tl.where(wide >= 1e-36, 1.0 / wide, 0.0), BLOCK_N // 4)
    places, exist = _locate_scales(scales_ptr, n0, d0, length, BLOCK_N)
    if WHOLE:
        tl.store(places, scale)
    else:
        tl.store(places, scale, mask=exist)
    tile = codes_ptr + d0.to(tl.int64) * length
    _store_rows(_encode(x0, inverse), tile, n0, length, WHOLE, BLOCK_N)
    _store_rows(_encode(x1, inverse), tile, n0 + 1, length, WHOLE, BLOCK_N)
    _store_rows(_encode(x2, inverse), tile, n0 + 2, length, WHOLE, BLOCK_N)
    _store_rows(_encode(x3, inverse), tile, n0 + 3, length, WHOLE, BLOCK_N)


@jit
def _store_rows(codes, tile, n, length, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store every fourth row from ``n`` of 64 columns."""
    rows = 4 * tl.arange(0, BLOCK_N // 4)[:, None]
    target = tile + n.to(tl.int64) * 64 + (rows * 64 + tl.arange(0, 64)[None, :])
    if WHOLE:
        tl.store(target, codes)
    else:
        tl.store(target, codes, mask=rows < length - n)


@jit
def load_code_rows(  # type: ignore[no-untyped-def]
    codes_ptr, n, d0, length, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Load every fourth row from ``n`` of 64 columns."""
    rows = 4 * tl.arange(0, BLOCK_N // 4)[:, None]
    source = codes_ptr + (d0.to(tl.int64) * length + n.to(tl.int64) * 64) + (rows * 64 + tl.arange(0, 64)[None, :])
    if WHOLE:
        return tl.load(source)
    else:
        return tl.load(source, mask=rows < length - n, other=128)


@jit
def load_four_codes(  # type: ignore[no-untyped-def]
    codes_ptr, n0, d0, length, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Load a tile of codes as ``load_four`` loads one of values."""
    x0 = load_code_rows(codes_ptr, n0, d0, length, WHOLE, BLOCK_N)
    x1 = load_code_rows(codes_ptr, n0 + 1, d0, length, WHOLE, BLOCK_N)
    x2 = load_code_rows(codes_ptr, n0 + 2, d0, length, WHOLE, BLOCK_N)
    x3 = load_code_rows(codes_ptr, n0 + 3, d0, length, WHOLE, BLOCK_N)
    return x0, x1, x2, x3


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
    """Return every fourth row of a tile in FP32, from its codes and from ``load_scales``.

    All products are exact, so this one multiplication and addition gives (code - 127.5) scale to the bit.
    """
    return tl.fma(_add_half_and_32768(codes), scales, scales * -32896.0)


@jit
def _add_half_and_32768(codes):  # type: ignore[no-untyped-def]
    """Return 2**15 + code + 1/2 in FP32: each byte becomes the middle of a number's bits, in one instruction."""
    if INTERPRETED:
        return ((codes.to(tl.int32) << 8) | 0x47000080).to(tl.float32, bitcast=True)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 high;
        mov.b32 high, 0x47000080;
        prmt.b32 $0, $4, high, 0x7504;
        prmt.b32 $1, $4, high, 0x7514;
        prmt.b32 $2, $4, high, 0x7524;
        prmt.b32 $3, $4, high, 0x7534;
        }""",
        "=r,=r,=r,=r,r", [codes], dtype=tl.float32, is_pure=True, pack=4,
    )  # fmt: skip
