"""A 32-bit master weight in two halves: the BF16 weight that the model computes with, and 16 more bits.

    bits  = high * 2**16 + low          high: the BF16 weight's bits;  low: a signed 16-bit remainder

``high`` is the FP32 number rounded to BF16, ties away from zero. Half a step up and half a step down are then 65,536
remainders, exactly what 16 bits hold. (Rounding ties to even would need 65,537.) So the model computes with the nearest
BF16 weight and the optimizer with the exact FP32 one, without a third copy.

Every number and both infinities are restored exactly, and NaN stays NaN. Rounding a NaN of 0x7FFF8000 or above would
carry into the sign (0x7FFFFFFF, which CUDA produces, would become -0.0 for the model), so these become 0x7FFF7FFF.

``join`` accepts any pair, also a weight with a stale remainder (weight_checksums.py). The result is within half a BF16
step of the weight, so it is finite if the weight is. Zero is the only exception: the patterns below 0x00000000 and
0x80000000 are NaNs of the other sign. ``split`` never makes such a pair, and ``join`` reads it as zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

CARRIES = 0x7FFF8000
"""Rounding a NaN from here on would carry into the sign."""
_SIZE = 0x7FFFFFFF


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the BF16 weight and the int16 remainder of an FP32 tensor."""
    bits = master.contiguous().view(torch.int32)
    carries = (bits & _SIZE) >= CARRIES
    if _needs_pass(carries):
        bits = torch.where(carries, (bits & ~_SIZE) | (CARRIES - 1), bits)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the FP32 tensor that ``split`` was given."""
    top = _high_bits(weight)
    bits = top + remainder
    crossed = (bits ^ top) < 0
    if _needs_pass(crossed):
        bits = torch.where(crossed, top, bits)
    return bits.view(torch.float32)


def compute_remainder(weight: Tensor, master: Tensor) -> Tensor:
    """Return the remainder of an FP32 master that is within half a BF16 step of ``weight``, ties either way."""
    apart = master.contiguous().view(torch.int32).long() - _high_bits(weight)
    return apart.clamp(-0x8000, 0x7FFF).to(torch.int16)


def is_rounded_from(weight: Tensor, master: Tensor) -> Tensor:
    """Return where a BF16 weight is its rounded FP32 master, ties either way; elsewhere it was overwritten."""
    apart = master.contiguous().view(torch.int32).long() - _high_bits(weight)
    return (apart >= -0x8000) & (apart <= 0x8000)


def _high_bits(weight: Tensor) -> Tensor:
    return weight.contiguous().view(torch.int16).to(torch.int32) << 16


def _needs_pass(special: Tensor) -> bool:
    """Whether rare bit patterns need an extra pass; always True on a GPU, where checking would synchronize."""
    return special.device.type != "cpu" or bool(special.any())
