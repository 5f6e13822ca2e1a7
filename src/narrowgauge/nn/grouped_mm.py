"""Grouped products (the experts of a mixture) under autocast, for which torch has no rule (``autocast_rules``).

``torch._grouped_mm`` multiplies tokens, sorted by expert, by a stack of matrices: [S, K] x [E, K, N]. Autocast has no
rule for it: FP32 experts would run in FP32 while other layers run in 16 bits, and 16-bit weights would reject FP32
tokens. Under torch.compile, transformers replaces grouped products with a loop if weights are FP32, since torch
compiles them only in BF16. The rule restores the grouped product.

Casting a module's parameters before it runs (``functional_call``) would be simpler, but wrong in one case: if tokens
gather their experts' matrices (``weight[index]``, transformers' batched_mm), the gradients of many tokens would be
summed in 16 bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
"""Formats that are cast, as in autocast's own products: FP64 is not."""
ALIGNMENT_BYTES = 16
"""Row alignment that grouped kernels need: 4 numbers in FP32, 8 in 16 bits."""


def grouped_product(
    dtype: torch.dtype | None,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``torch._grouped_mm`` of operands cast to ``dtype``; None does not cast."""
    if dtype is None or a.dtype not in CASTABLE or b.dtype not in CASTABLE:
        product: Tensor = aten._grouped_mm.default(a, b, offs, bias, out_dtype)
        return product
    width = b.shape[-1]
    a, b = a.to(dtype), b.to(dtype)
    if a.dim() == 2 and b.dim() == 3:
        a, b = _align(a, b)
    product = aten._grouped_mm.default(a, b, offs, bias, out_dtype)
    return product if product.shape[-1] == width else product[..., :width]


def multiply_looped(dtype: torch.dtype | None, input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Do the same for transformers' loop, which remains for formats that grouped kernels do not support."""
    if dtype is torch.bfloat16:
        return grouped_product(dtype, input, weight, offs)
    if dtype is not None:
        input, weight = input.to(dtype), weight.to(dtype)
    looped: Tensor = torch.ops.transformers.grouped_mm_fallback(input, weight, offs)
    return looped


def _align(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Pad [S, K] and [E, K, N] with zeros to rows of a multiple of 16 bytes; zeros add nothing to the sums."""
    step = ALIGNMENT_BYTES // a.element_size()
    depth, width = -a.shape[1] % step, -b.shape[2] % step
    if depth:
        a = F.pad(a, (0, depth))
    return a, F.pad(b, (0, width, 0, depth)) if depth or width else b
