"""Tensors inside torch.func's transforms (vmap, grad, jacrev): each transform wraps the tensors it is applied to."""

from __future__ import annotations

import torch
from torch import Tensor


def list_levels(tensor: Tensor) -> list[Tensor]:
    """Return the tensor, the one it wraps, and so on to the plain tensor. Each has the autograd graph of its level."""
    levels = [tensor]
    while torch._C._functorch.is_functorch_wrapped_tensor(levels[-1]):
        levels.append(torch._C._functorch.get_unwrapped(levels[-1]))
    return levels


def unwrap_transforms(tensor: Tensor) -> Tensor:
    """Return the plain tensor behind a wrapped one, with all samples of a vmap. A plain tensor is returned as it is."""
    return list_levels(tensor)[-1]
