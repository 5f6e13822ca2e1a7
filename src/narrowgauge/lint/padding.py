"""What padding a dimension costs and brings, predicted from shapes.

A tensor core's operands are read 16 bytes at a time where rows begin on 16 bytes, that is where a dimension is a
multiple of 8 in 16 bits. Where it is not, cuBLAS takes kernels that read 2, 4 or 8 bytes at a time: on an H200 six to
seven times slower (docs/results.md), which ``UNALIGNED`` is from; findings say so, as other GPUs differ. FP8 products
refuse such shapes, so a layer stays in BF16; what that costs follows from the shares of the peaks that are reached
(nn/products/choose_formats.py).
"""

from __future__ import annotations

UNALIGNED = 0.15
"""Rate of a BF16 product whose rows do not begin on 16 bytes, as a share of the aligned one's: measured on an H200."""
FP8_TIME = 0.54
"""Time of an FP8 product beside BF16's: 0.65 of BF16's peak is reached, 0.60 of FP8's, which is twice as high."""


def multiple_for(compute: str) -> int | None:
    """What dimensions must be multiples of; None where it does not matter."""
    return {"fp16": 8, "bf16": 8, "fp8": 16, "tf32": 4}.get(compute)


def padded(size: int) -> int:
    """The next good size: a multiple of 64, which is a whole number of tiles, or of 16 where that adds over 2%."""
    best = -(-size // 64) * 64
    return best if best - size <= 0.02 * size else -(-size // 16) * 16


def saved(share: float, size: int, compute: str) -> float:
    """How much of the model's time in products padding would save, where the layer has this share of their work."""
    grown = padded(size) / size
    now = 1 / UNALIGNED if size % 8 else 1.0  # in 16 bits; what FP8 refuses stays there
    then = grown * (FP8_TIME if compute == "fp8" else 1.0)
    rest = (1 - share) * (FP8_TIME if compute == "fp8" else 1.0)
    return max(0.0, 1 - (rest + share * then) / (rest + share * now))
