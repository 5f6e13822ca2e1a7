"""Rounds the operands of emulated products to block formats: by a kernel on a GPU, in plain torch elsewhere.

Both give the same bits (``kernels/round_blocks.py``), except that stochastic rounding has different random numbers.
Both draw them from torch's generator of the device. To request the blocks changes neither values nor generators.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.block_formats import BlockFormat, ScaleRule
from narrowgauge.kernels import use_triton
from narrowgauge.kernels.round_blocks import HADAMARD_BLOCK, draw_seed, round_blocks, transform_hadamard
from narrowgauge.scaling.block_quantize import (
    INPUTS,
    SCALE_DTYPES,
    QuantizedBlocks,
    Rounding,
    quantize_blocks,
    random_hadamard,
)


class RoundedMatrix(NamedTuple):
    """An operand of an emulated product."""

    values: Tensor
    """[N, K] in BF16: elements times the scales of their blocks."""
    tensor_scale: Tensor | None
    """FP32 scalar that multiplies the product; None if the format has none."""
    blocks: QuantizedBlocks | None
    """The same as codes and scales; None if it was not requested and the kernel did not need it."""


@torch.no_grad()
def round_matrix(
    x: Tensor,
    format: BlockFormat,
    *,
    rounding: Rounding = "nearest",
    scale_rule: ScaleRule = "floor",
    with_blocks: bool = False,
) -> RoundedMatrix:
    """Round a matrix to blocks along its last dimension.

    Args:
        x: [N, K] in FP32, BF16 or FP16, with any strides.
        format: The block format.
        rounding: Of the elements.
        scale_rule: How powers of two are selected, for MX formats.
        with_blocks: Whether codes and scales are needed.
    """
    if not use_triton(x):
        blocks = quantize_blocks(x, format, rounding=rounding, scale_rule=scale_rule)
        values = blocks.dequantize(torch.bfloat16, apply_tensor_scale=False)
        return RoundedMatrix(values, blocks.tensor_scale, blocks)
    made = round_blocks(
        x, format.element.name, format.block, powers=format.scale == "e8m0", round_up=scale_rule == "up",
        seed=draw_seed(x.device) if rounding == "stochastic" else None, with_codes=with_blocks,
    )  # fmt: skip
    tensor_scale = made.tensor_scale if format.tensor_scale else None
    found = None
    if with_blocks:
        found = QuantizedBlocks(made.codes, made.scales.view(SCALE_DTYPES[format.scale]), tensor_scale, format)
    return RoundedMatrix(made.values, tensor_scale, found)


@torch.no_grad()
def spread_outliers(x: Tensor, signs: Tensor) -> Tensor:
    """Return the random Hadamard transform of a matrix [N, K] in blocks of 16, padded with columns of zeros.

    Args:
        x: With any strides.
        signs: [16] on the device of ``x``, integers: each 1 or -1.
    """
    if use_triton(x) and x.dtype in INPUTS:
        return transform_hadamard(x, signs)
    padded = F.pad(x, (0, -x.shape[-1] % HADAMARD_BLOCK))
    return random_hadamard(padded, block=HADAMARD_BLOCK, signs=signs)
