"""An embedding whose gradient is computed by narrowgauge's kernel; lookup and parameters do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.kernels.embedding import embedding_backward
from narrowgauge.nn.module_changes import Change, apply_change, has_own_method, original_class


def fits(module: nn.Module) -> bool:
    """Whether a module is a plain FP32 embedding, without torch's special options for gradients."""
    if original_class(module) is not nn.Embedding or has_own_method(module, "forward"):
        return False
    assert isinstance(module, nn.Embedding)
    special = module.padding_idx is not None or module.max_norm is not None
    return not (special or module.scale_grad_by_freq or module.sparse) and module.weight.dtype is torch.float32


class ConvertedEmbedding(Change):
    """An embedding whose gradient ``embedding_backward`` computes on a GPU."""

    differentiable_twice = False

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        weight = module.weight
        plain = type(weight) is nn.Parameter and weight.is_cuda and fits(module)
        needed = torch.is_grad_enabled() and weight.requires_grad
        if not (plain and needed) or torch.compiler.is_compiling() or torch.are_deterministic_algorithms_enabled():
            return inner(*args, **kwargs)
        return _Lookup.apply(weight, *args, *kwargs.values())  # type: ignore[no-untyped-call]


def convert_embedding(module: nn.Module) -> None:
    apply_change(module, ConvertedEmbedding())


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.words = len(weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        return embedding_backward(grad.reshape(-1, grad.shape[-1]), ids.reshape(-1), ctx.words), None
