"""A 32-bit master weight in two halves: the BF16 weight a model computes with, and 16 bits that complete it.

    bits  = high * 2**16 + low          high: the BF16 weight's bits;  low: a signed 16-bit remainder

``high`` is the FP32 number rounded to BF16, halves away from zero: half a step up and half a step down are then 65,536
remainders, which is what 16 bits hold. (Rounding halves to even would need 65,537.) So the model computes with the
nearest BF16 weight, the optimizer with the exact FP32 one, and no third copy is kept.

Every number and both infinities come back bit for bit, and NaN stays NaN. Rounding a NaN of 0x7FFF8000 or above would
carry into the sign (0x7FFFFFFF, which CUDA produces, would turn into -0.0 for the model), so these count as 0x7FFF7FFF.

``join`` takes any pair, also a weight with a remainder that belongs to another one (weight_checksums.py): the result is
then within half a BF16 step of the weight, so that it is finite where the weight is. Zero is the one weight for which
the sum above is no such number: below 0x00000000 and 0x80000000 lie NaNs of the other sign. ``split`` makes no such
pair; ``join`` reads it as the zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

CARRIES = 0x7FFF8000
"""NaNs from here on would carry into the sign."""
_SIZE = 0x7FFFFFFF


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The BF16 weight and the int16 remainder of an FP32 tensor."""
    bits = master.contiguous().view(torch.int32)
    carries = (bits & _SIZE) >= CARRIES
    if _needs_pass(carries):
        bits = torch.where(carries, (bits & ~_SIZE) | (CARRIES - 1), bits)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 tensor that ``split`` was given."""
    top = _high_bits(weight)
    bits = top + remainder
    crossed = (bits ^ top) < 0
    if _needs_pass(crossed):
        bits = torch.where(crossed, top, bits)
    return bits.view(torch.float32)


def compute_remainder(weight: Tensor, master: Tensor) -> Tensor:
    """What completes a BF16 weight to an FP32 number that is within half a step of it, ties rounded either way."""
    apart = master.contiguous().view(torch.int32).long() - _high_bits(weight)
    return apart.clamp(-0x8000, 0x7FFF).to(torch.int16)


def is_rounded_from(weight: Tensor, master: Tensor) -> Tensor:
    """Where a BF16 weight is its FP32 master rounded, ties either way: where nobody has written it by itself."""
    apart = master.contiguous().view(torch.int32).long() - _high_bits(weight)
    return (apart >= -0x8000) & (apart <= 0x8000)


def _high_bits(weight: Tensor) -> Tensor:
    return weight.contiguous().view(torch.int16).to(torch.int32) << 16


def _needs_pass(special: Tensor) -> bool:
    """Whether the rare patterns need their own pass; on a GPU always, since to look would be to wait for it."""
    return special.device.type != "cpu" or bool(special.any())
