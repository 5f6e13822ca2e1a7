"""Activations in plain torch: what the kernels of ``activation`` are tested against, and what runs without them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

GATES = {"swiglu": "silu", "geglu": "gelu", "geglu-tanh": "gelu-tanh", "reglu": "relu"}
"""Gated activations, and the function of the gate."""
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
CUBIC = 0.044715
QUICK = 1.702
DENSITY = 1.0 / math.sqrt(2.0 * math.pi)


def evaluate_reference(kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return f(x) and f'(x) of the table in ``activation``, in the dtype of x."""
    if kind == "gelu":
        cdf: Tensor = 0.5 * torch.special.erfc(-x * math.sqrt(0.5))  # not 1 + erf, which cancels in the tail
        return x * cdf, cdf + x * torch.exp(-0.5 * x**2) * DENSITY
    if kind.startswith("relu"):
        positive = torch.relu(x)
        return (positive, (x > 0).to(x.dtype)) if kind == "relu" else (positive.square(), 2 * positive)
    if kind == "gelu-tanh":
        f, change = torch.sigmoid(SLOPE * (x + CUBIC * x**3)), SLOPE * (1 + 3 * CUBIC * x**2)
        return x * f, f + x * f * (1 - f) * change
    rate = {"gelu-quick": QUICK, "silu": 1.0}[kind]
    f = torch.sigmoid(rate * x)
    return x * f, f + x * f * (1 - f) * rate


def activate_reference(kind: str, u: Tensor, gate_last: bool = False) -> Tensor:
    """Return the activation before the cast, in FP32 (FP64 for FP64 input)."""
    u = widen(u)
    if kind not in GATES:
        return evaluate_reference(kind, u)[0]
    gate, up = split_gate(u, gate_last)
    return evaluate_reference(GATES[kind], gate)[0] * up


def activate_backward_reference(kind: str, grad_output: Tensor, u: Tensor, gate_last: bool = False) -> Tensor:
    """Return the gradient of u before the cast, in FP32 (FP64 for FP64 input)."""
    grad_output, u = widen(grad_output), widen(u)
    if kind not in GATES:
        return grad_output * evaluate_reference(kind, u)[1]
    gate, up = split_gate(u, gate_last)
    value, slope = evaluate_reference(GATES[kind], gate)
    return torch.cat([grad_output * up * slope, grad_output * value][:: -1 if gate_last else 1], dim=1)


def widen(x: Tensor) -> Tensor:
    """Return FP64 as it is and everything else in FP32."""
    return x if x.dtype is torch.float64 else x.float()


def split_gate(u: Tensor, gate_last: bool) -> tuple[Tensor, Tensor]:
    """Return gate and up of a packed tensor."""
    first, second = u.chunk(2, dim=1)
    return (second, first) if gate_last else (first, second)
