"""A 32-bit master weight in two halves: the BF16 weight a model computes with, and 16 bits that complete it.

    bits  = high * 2**16 + low          high: the BF16 weight's bits;  low: a signed 16-bit remainder

``high`` is the FP32 number rounded to BF16, halves away from zero: half a step up and half a step down are then 65,536
remainders, which is what 16 bits hold. (Rounding halves to even would need 65,537.) So the model computes with the
nearest BF16 weight, the optimizer with the exact FP32 one, and no third copy is kept.

Two patterns need care, both NaN. Rounding 0x7FFF8000 and above carries into the sign: the NaN that CUDA produces,
0x7FFFFFFF, would turn into -0.0 for the model. These keep 0x7FFF for high, which has codes to spare only if the NaNs
that rounding sends there from below, 0x7FFE8000 to 0x7FFEFFFF, go elsewhere: to zero with a negative remainder, codes
that nothing else has. Hardware makes none of those. With that, every one of the 2**32 patterns survives.
"""

from __future__ import annotations

import torch
from torch import Tensor

CARRIES = 0x7FFF8000
"""NaNs from here on would carry into the sign."""
DISPLACED = 0x7FFE8000
"""NaNs from here to 0x7FFF0000 make room for them."""
_SIZE, _LOW = 0x7FFFFFFF, 0xFFFF


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The BF16 weight and the int16 remainder of an FP32 tensor."""
    bits = master.contiguous().view(torch.int32)
    size = bits & _SIZE
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    special = size >= DISPLACED
    if _may_have(special):
        sign = bits & ~_SIZE
        carries = size >= CARRIES
        displaced = special & (size < 0x7FFF0000)
        high = torch.where(carries, (sign | 0x7FFF0000) >> 16, torch.where(displaced, sign >> 16, high))
        low = torch.where(carries | displaced, _signed(bits & _LOW), low)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 tensor that ``split`` was given."""
    high, low = weight.contiguous().view(torch.int16).to(torch.int32), remainder.to(torch.int32)
    bits = (high << 16) + low
    size = high & 0x7FFF
    special = (low < 0) & ((size == 0) | (size == 0x7FFF))
    if _may_have(special):
        sign = (high << 16) & ~_SIZE
        top = 0x7FFF0000 - ((size == 0).to(torch.int32) << 16)
        bits = torch.where(special, sign | top | (low & _LOW), bits)
    return bits.view(torch.float32)


def _may_have(special: Tensor) -> bool:
    """Whether the rare patterns need their own pass; on a GPU always, since to look would be to wait for it."""
    return special.device.type != "cpu" or bool(special.any())


def _signed(low: Tensor) -> Tensor:
    """A 16-bit pattern as the number int16 has for it."""
    return torch.where(low >= 0x8000, low - 0x10000, low)
