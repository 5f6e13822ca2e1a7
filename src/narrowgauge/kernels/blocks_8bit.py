"""A matrix in 8 bits, with one scale for 64 neighbours of a row: how pre-activations are kept for backward.

    scale = max |x| / 127, rounded up to BF16        code = round(x / scale) + 128, from 1 to 255

Integers have equal steps, so the error is at most half a step, 1/254 of the largest of 64 values: 44 dB for normally
distributed values. E4M3 with the same scales has 31.5 dB, because its steps grow with the values.

A block with inf or NaN has a scale that is not finite, and is read back as values that are not finite. Values so small
that the scale's reciprocal would overflow become 0.

In kernels, adding 2**23 + 128 to a number puts it, rounded, into the lowest byte; this costs one instruction.
``bytes | 2**23`` as a float, minus the same number, reads it back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, jit
from narrowgauge.kernels.fp8_tile import abs_bits, to_fp32

if HAVE_TRITON:
    import triton.language as tl

BLOCK = 64
"""Columns with one scale: the width of a tile, in which a kernel has a row's values together."""
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
    """[ceil(D / 64), N], BF16: the scales of a column of blocks are neighbours."""

    def decode(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the matrix in a wider format."""
        return decode_reference(self.codes, self.scales).to(dtype)


def allocate(like: Tensor) -> Blocks8:
    """Return codes and scales for a matrix, not yet written."""
    (length, width), device = like.shape, like.device
    scales = torch.empty((-(-width // BLOCK), length), dtype=torch.bfloat16, device=device)
    return Blocks8(torch.empty((length, width), dtype=torch.uint8, device=device), scales)


def encode_reference(x: Tensor) -> Blocks8:
    """Encode a matrix in plain torch."""
    length, width = x.shape
    blocks = torch.nn.functional.pad(x.float(), (0, -width % BLOCK)).view(length, -1, BLOCK)
    scales = (blocks.abs().amax(-1) * ROOM).to(torch.bfloat16)
    wide = scales.float()
    inverse = torch.where(wide >= SMALLEST, 1.0 / wide, 0.0)
    inverse = torch.where(wide.isfinite(), inverse, 0.0)
    rounded = torch.round(blocks.nan_to_num(0.0, 0.0, 0.0) * inverse[..., None])
    codes = (rounded + ZERO).to(torch.uint8).view(length, -1)[:, :width]
    return Blocks8(codes.contiguous(), scales.t().contiguous())


def decode_reference(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix in FP32, in plain torch."""
    wide = scales.t().float().repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return (codes.float() - ZERO) * wide


@jit
def store_codes(  # type: ignore[no-untyped-def]
    x, codes_ptr, scales_ptr, n, d0, length, width, stride,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store a tile of every fourth row from ``n`` (as ``load_rows`` loads it; 0 outside the tensor) in 8 bits."""
    tl.static_assert(BLOCK_D == 64)
    x = to_fp32(x)
    top = tl.max(abs_bits(x), 1).to(tl.float32, bitcast=True)  # as bits, NaN is the largest
    scale = (top * 0.007935531496062992).to(tl.bfloat16)  # ROOM
    wide = scale.to(tl.float32)
    inverse = tl.where(wide >= 1e-36, 1.0 / wide, 0.0)
    shifted = x * inverse[:, None] + 8388736.0
    codes = (shifted.to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)
    rows = 4 * tl.arange(0, BLOCK_N // 4)
    columns = tl.arange(0, BLOCK_D)[None, :]
    target = codes_ptr + (n.to(tl.int64) * stride + d0) + (rows[:, None] * stride + columns)
    places = scales_ptr + ((d0 // 64).to(tl.int64) * length + n) + rows
    if WHOLE:
        tl.store(target, codes)
        tl.store(places, scale)
    else:
        tl.store(target, codes, mask=(rows[:, None] < length - n) & (columns < width - d0))
        tl.store(places, scale, mask=rows < length - n)


@jit
def load_scales(  # type: ignore[no-untyped-def]
    scales_ptr, n, d0, length, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Load the scales of a tile of every fourth row from ``n``."""
    rows = 4 * tl.arange(0, BLOCK_N // 4)
    places = scales_ptr + ((d0 // 64).to(tl.int64) * length + n) + rows
    if WHOLE:
        scales = tl.load(places)
    else:
        scales = tl.load(places, mask=rows < length - n, other=0.0)
    return scales


@jit
def decode_codes(codes, scales):  # type: ignore[no-untyped-def]
    """Return a tile of codes in FP32. Outside the tensor scales are 0, and so are the values."""
    shifted = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return (shifted - 8388736.0) * scales.to(tl.float32)[:, None]
