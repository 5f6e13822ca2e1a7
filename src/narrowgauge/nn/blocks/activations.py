"""The activations of an MLP, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda u: F.gelu(u, approximate="tanh"),
    "gelu-quick": lambda u: u * torch.sigmoid(1.702 * u),
    "relu": F.relu,
    "relu-squared": lambda u: F.relu(u).square(),
    "silu": F.silu,
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu-tanh": "gelu-tanh", "reglu": "relu"}
"""Gated activations, and the function of the gate."""


def compute_activation(name: str, u: Tensor, gate_last: bool = False) -> Tensor:
    """Return act(u); for a gated activation u is [gate, up], or [up, gate] if the gate comes last."""
    if name not in GATED:
        return ACTIVATIONS[name](u)
    gate, up = u.chunk(2, -1)[:: -1 if gate_last else 1]
    return ACTIVATIONS[GATED[name]](gate) * up
