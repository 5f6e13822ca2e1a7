"""Equations between recorded tensors: whether two are the same, and whether a module is a norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks.observe import Call
from narrowgauge.nn.blocks.spec import NormSpec

TOLERANCE = 2e-4
"""Of sums, relative to the largest value: FP32 in another order differs by less, another formula by more."""
EXACT = 1e-5
"""Of functions of single values: GELU and its tanh form differ by 1e-4."""


def are_close(one: Tensor, other: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether two tensors are the same up to the rounding of FP32."""
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= tolerance * max(float(other.abs().max()), 1e-6))


def recognize_norm(call: Call) -> NormSpec | None:
    """Return the description of a module whose output is a norm of its input."""
    own = dict(call.module.named_parameters(recurse=False))
    weight, bias = own.pop("weight", None), own.pop("bias", None)
    if weight is None or own or weight.dim() != 1 or call.input.shape != call.output.shape:
        return None
    if call.input.shape[-1] != len(weight):
        return None
    for kind in ("layer", "rms"):
        for eps in _list_eps(call.module):
            for offset in (0.0, 1.0):
                if are_close(compute_norm(call.input, weight, bias, kind, eps, offset), call.output):
                    return NormSpec(call.path, kind, eps, offset)
    return None


def compute_norm(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float, offset: float) -> Tensor:
    """Return the norm in plain torch."""
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * (offset + weight)
    return y if bias is None else y + bias


def _list_eps(module: nn.Module) -> list[float]:
    stated = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon"))
    return [float(eps) for eps in stated if isinstance(eps, float | int)] or [1e-5, 1e-6, 1e-12]
