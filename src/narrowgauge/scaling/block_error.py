"""What rounding to a block format does to values: how many are flushed to zero, how many saturate, and the noise.

    flushed     a nonzero value that became zero
    saturated   a value above the largest number of its block, element max * scale of the block * scale of the tensor.
                The rule ``floor`` for scales and NVFP4's rounded scales have some in every tensor
    lost        a value that cannot be read back: its block has an inf or NaN
    SQNR        10 log10(sum of x**2 / sum of (x - rounded)**2) in dB, over all values that can be read back

All counts stay on the device. Padding does not count: it is zero, and zeros are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.scaling.block_quantize import QuantizedBlocks

FIELDS = ("nonzero", "flushed", "saturated", "lost", "signal", "noise")
"""What ``measure_rounding`` returns, in this order: four counts and two sums of squares."""
_TOLERANCE = 1 + 2.0**-20
"""The product of two scales is rounded to FP32: a value at the limit does not count as above it."""


@torch.no_grad()
def measure_rounding(x: Tensor, blocks: QuantizedBlocks, dimensions: int | None = None) -> Tensor:
    """Compare values with their blocks.

    Args:
        x: The values [..., K].
        blocks: What ``quantize_blocks`` made of them.
        dimensions: How many of the last dimensions are summed; all of them by default.

    Returns:
        [..., 6] in FP64: one number for each of ``FIELDS``.
    """
    f = blocks.format
    values, read = x.float(), blocks.dequantize()
    limits = blocks.scales.float().unsqueeze(-1) * (f.element.max * _TOLERANCE)
    if blocks.tensor_scale is not None:
        limits = limits * blocks.tensor_scale
    limits = limits.expand(*limits.shape[:-1], f.block).flatten(-2)[..., : x.shape[-1]]
    finite, nonzero = read.isfinite(), values != 0
    is_zero = (blocks.codes & ((1 << (f.element.bits - 1)) - 1)) == 0
    parts = (
        nonzero,
        nonzero & is_zero & finite,
        (values.abs() > limits) & finite,
        ~finite,
        torch.where(finite, values, 0.0).square(),
        torch.where(finite, values - read, 0.0).square(),
    )
    summed = tuple(range(-(dimensions or x.ndim), 0))
    return torch.stack([part.sum(summed, dtype=torch.float64) for part in parts], -1)
