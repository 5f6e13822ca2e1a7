"""An embedding whose gradient is added up by narrowgauge's kernel; lookup and parameters stay what they were."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.kernels.embedding import embedding_gradient
from narrowgauge.nn.overrides import override


def fits(module: nn.Module) -> bool:
    """Whether a module is a plain embedding, of FP32, without torch's special ways with gradients."""
    if type(module) is not nn.Embedding:
        return False
    special = module.padding_idx is not None or module.max_norm is not None
    return not (special or module.scale_grad_by_freq or module.sparse) and module.weight.dtype is torch.float32


def replace_forward(module: nn.Module) -> None:
    """Let the embedding's gradient be computed by ``embedding_gradient``, where that is on a GPU."""
    layer: Any = module

    def forward(input: Tensor) -> Tensor:
        weight = layer.weight
        plain = type(weight) is nn.Parameter and weight.is_cuda and weight.dtype is torch.float32
        needed = torch.is_grad_enabled() and weight.requires_grad
        if not (plain and needed) or torch.compiler.is_compiling() or torch.are_deterministic_algorithms_enabled():
            return F.embedding(input, weight)
        output: Tensor = _Lookup.apply(weight, input)  # type: ignore[no-untyped-call]
        return output

    override(module, forward)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.words = len(weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        return embedding_gradient(grad.reshape(-1, grad.shape[-1]), ids.reshape(-1), ctx.words), None
