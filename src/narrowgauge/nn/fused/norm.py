"""A norm as an autograd function of narrowgauge's kernel: statistics in FP32, BF16 output, one pass each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels import norm


def run_norm(x: Tensor, weight: Tensor, eps: float, kind: str) -> Tensor:
    """Return norm(x) * weight for x [..., D], as rows [N, D] in BF16; ``kind`` is layer or rms."""
    with torch.autocast(x.device.type, enabled=False):
        output: Tensor = _Norm.apply(x, weight, eps, kind)  # type: ignore[no-untyped-call]
    return output


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kind: str) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        made = norm.norm(rows, weight, eps=eps, kind=kind)
        ctx.save_for_backward(rows, weight, made.rstd, *([] if made.mean is None else [made.mean]))
        ctx.kind, ctx.shape = kind, x.shape
        return made.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight, rstd, *mean = ctx.saved_tensors
        grad_input, _, grad_weight, _ = norm.norm_backward(
            grad, rows, weight, mean[0] if mean else None, rstd, kind=ctx.kind
        )
        return grad_input.view(ctx.shape), grad_weight, None, None
