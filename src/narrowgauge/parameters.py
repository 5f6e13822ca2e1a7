"""Facts about a parameter that do not depend on what trains it: whether it is sharded, and its gradient's dtype."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor. Does not import DTensor, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which autograd stores a parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype
