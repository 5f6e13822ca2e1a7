"""Frozen weights that are stored in FP8: the bytes are the weight itself, and no copy of it.

The dtype is uint8, so that code which does not know of the scale fails: FP8 would be cast to BF16 by autocast and
``model.to``, without the scale. ``scale`` is what the E4M3 numbers are multiplied by to give the weight. Which layers
store their weights so, and how they compute then, is in ``nn.products.stored_fp8``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.kernels.cast import transpose
from narrowgauge.kernels.cast_weights import cast_weight
from narrowgauge.kernels.fp8_formats import SATURATION_THRESHOLD
from narrowgauge.kernels.fp8_tile import quantize_reference
from narrowgauge.scaling.operand import Operand
from narrowgauge.weight_copies.adjacent import view_as_one

E4M3 = torch.float8_e4m3fn


def make_stored(weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return weights as one tensor of bytes, stacked along the outputs, and the scale that they share."""
    lp, _, scale, _ = cast_weight(weights, E4M3, transposed=False)
    return lp.view(torch.uint8), scale


def read_stored(weights: Sequence[Tensor], scale: Tensor, transposed: bool = False) -> Operand:
    """Return stored weights as products read them: without a copy if they are adjacent and not transposed."""
    parts = [weight.detach() for weight in weights]
    joint = parts[0] if len(parts) == 1 else view_as_one(parts)
    lp = (torch.cat(parts) if joint is None else joint).view(E4M3)
    return Operand(None, lp, transpose(lp) if transposed else None, scale)


def widen_bytes(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of stored bytes in a wider format."""
    values: Tensor = stored.view(E4M3).float() * scale
    return values.to(dtype)


def quantize_to_scale(values: Tensor, scale: Tensor) -> Tensor | None:
    """Return FP32 values as bytes with a given scale, or None if they do not fit it."""
    if not bool(values.abs().amax() <= SATURATION_THRESHOLD[E4M3] * scale):
        return None
    return quantize_reference(values, scale.reciprocal(), E4M3).view(torch.uint8)
