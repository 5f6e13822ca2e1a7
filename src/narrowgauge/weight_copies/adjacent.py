"""Weights that are used as one (query, key and value; gate and up) lie next to each other in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_moved: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters that were moved into a buffer here. A user's own views of a buffer are not."""


def store_contiguously(weights: Sequence[nn.Parameter]) -> None:
    """Move parameters that are used as one into one buffer, so that they are cast as one, and need no stacked copy."""
    same = len({(weight.dtype, weight.device, weight.shape[1:]) for weight in weights}) == 1
    if len(weights) > 1 and same and view_as_one(weights) is None:
        joint = torch.cat([weight.detach() for weight in weights])
        for weight, part in zip(weights, joint.split([len(weight) for weight in weights]), strict=True):
            weight.data = part
            _moved[weight] = None


def store_apart(weights: Iterable[nn.Parameter]) -> None:
    """Give parameters that were moved into one buffer their own memory: libraries take its parts for tied weights."""
    for weight in weights:
        if weight in _moved:
            del _moved[weight]
            if weight.untyped_storage().nbytes() > weight.numel() * weight.element_size():
                weight.data = weight.data.clone()


def view_as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that are adjacent in memory as one tensor, or None if they are not adjacent."""
    first = parts[0].detach()
    end = first.storage_offset()
    for part in parts:
        same = part.untyped_storage()._cdata == first.untyped_storage()._cdata and part.dtype is first.dtype
        if not same or not part.is_contiguous() or part.storage_offset() != end:
            return None
        end += part.numel()
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())
