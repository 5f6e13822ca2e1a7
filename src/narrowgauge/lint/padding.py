"""Predicts from shapes what padding a dimension costs and saves.

A tensor core's operands are read 16 bytes at a time where rows begin on 16 bytes, that is, where a dimension is
a multiple of 8 in 16 bits. Otherwise cuBLAS uses kernels that read 2, 4 or 8 bytes at a time: on an H200 six to
seven times slower. Findings name the H200, as other GPUs differ. FP8 products reject such shapes, so a layer stays in
BF16. What both cost follows from the fractions of the peaks that training reaches (``peak_fractions.toml``).
"""

from __future__ import annotations

from narrowgauge.peak_fractions import get_fraction

UNALIGNED = get_fraction("unaligned_product")
"""Rate of a BF16 product whose rows do not begin on 16 bytes, divided by the aligned one's."""
FP8_TIME = get_fraction("product.bf16") / (2 * get_fraction("product.fp8"))
"""Time of an FP8 product divided by that in BF16: the FP8 peak is twice as high."""


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
