"""AutocastFlow: which tensors of a run in FP32 or BF16 would be in FP16 if the same code ran under FP16 autocast.

    products (linear, matmul, convolutions, attention)    FP16, and their inputs are cast to it
    functions of autocast's FP32 list (softmax, losses)   FP32
    .float(), .double()                                   FP32
    first argument decides (batch norm, dropout, ...)     as that
    others                                                FP16 if every floating tensor with dimensions is

In a run under BF16 autocast the formats are real: what is in BF16 there would be in FP16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from narrowgauge.nn.keep_fp32 import FP32_FUNCTIONS, HALVES

_PRODUCTS = frozenset(
    {
        F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.matmul, torch.mm, torch.bmm, torch.addmm,
        torch.baddbmm, torch.addbmm, torch.mv, torch.einsum, torch.chain_matmul, Tensor.matmul, Tensor.mm, Tensor.bmm,
        Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mv, Tensor.addmm, Tensor.baddbmm,
    }
)  # fmt: skip
_WIDENING = frozenset({Tensor.float, Tensor.double, F.embedding})
_LIKE_FIRST = frozenset({F.batch_norm, F.instance_norm, F.dropout, F.prelu, Tensor.masked_fill, Tensor.to})


class AutocastFlow:
    """Follows formats from call to call."""

    def __init__(self, autocast: bool) -> None:
        """Start a forward.

        Args:
            autocast: Whether the run itself is under autocast, so that formats are real.
        """
        self.autocast = autocast
        self._half: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def is_half(self, tensor: Tensor) -> bool:
        """Whether the tensor would be in FP16."""
        return tensor.dtype in HALVES or tensor in self._half

    def find_narrowed(self, func: Any, args: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the inputs of a product that it casts to FP16, with a description; weights are read elsewhere."""
        if func not in _PRODUCTS:
            return
        for one in args:
            is_data = isinstance(one, Tensor) and one.is_floating_point() and not isinstance(one, torch.nn.Parameter)
            if is_data and one.numel() and not self.is_half(one):
                yield f"input of {func.__name__.strip('_')}", one

    def add(self, func: Any, args: Any, result: Tensor) -> bool:
        """Note a result, and return whether it would be in FP16."""
        half = result.dtype in HALVES or (not self.autocast and self._would_be_half(func, args))
        if half:
            self._half[result] = True
        else:
            self._half.pop(result, None)
        return half

    def _would_be_half(self, func: Any, args: Any) -> bool:
        if func in _PRODUCTS:
            return True
        if func in FP32_FUNCTIONS or func in _WIDENING:
            return False
        flat = [two for one in args for two in (one if isinstance(one, tuple | list) else (one,))]
        tensors = [one for one in flat if isinstance(one, Tensor) and one.is_floating_point() and one.dim()]
        if func in _LIKE_FIRST:
            tensors = tensors[:1]
        return bool(tensors) and all(map(self.is_half, tensors))
