"""What models do to logits between head and loss: multiply by numbers, and cap by tanh or sigmoid, as a ``LossForm``.

    Cohere     logits * scale                            multiplier = scale
    Granite    logits / scaling                          multiplier = 1 / scaling
    Gemma 2    tanh(logits / cap) * cap                  multiplier = 1, cap
    (others)   limit * sigmoid(logits / width)           multiplier = limit / width / 4, cap = limit / 2

The last is the third but for a constant, limit / 2, which changes no softmax: sigmoid(y) = (1 + tanh(y / 2)) / 2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.kernels.cross_entropy import LossForm


class Step(NamedTuple):
    """A call of a function of one tensor and at most one number."""

    kind: str
    """multiply, divide, tanh or sigmoid."""
    number: float = 1.0


_KINDS = {
    "multiply": (Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__, torch.mul, torch.multiply),
    "divide": (
        Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.__truediv__, torch.div, torch.divide, torch.true_divide,
    ),
    "tanh": (Tensor.tanh, torch.tanh),
    "sigmoid": (Tensor.sigmoid, torch.sigmoid),
}  # fmt: skip
_KIND_OF = {func: kind for kind, functions in _KINDS.items() for func in functions}


def read_step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
    """Return a call as a step; None if it is none. ``args`` are those after the tensor."""
    kind = _KIND_OF.get(func)
    if kind is None or kwargs:
        return None
    if kind in ("tanh", "sigmoid"):
        return None if args else Step(kind)
    return Step(kind, float(args[0])) if len(args) == 1 and type(args[0]) in (int, float) else None


def apply_steps(x: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """Return a tensor after these steps."""
    for kind, number in steps:
        if kind in ("tanh", "sigmoid"):
            x = torch.tanh(x) if kind == "tanh" else torch.sigmoid(x)
        else:
            x = x * number if kind == "multiply" else x / number
    return x


def combine_steps(steps: tuple[Step, ...], smoothing: float = 0.0) -> LossForm | None:
    """Return the form of a loss of logits after these steps; None if no form says the same."""
    multiplier, cap = 1.0, None
    for kind, number in steps:
        if kind == "multiply" or (kind == "divide" and number):
            factor = number if kind == "multiply" else 1.0 / number
            multiplier *= factor
            cap = None if cap is None else cap * factor
        elif kind == "divide" or cap is not None:
            return None
        elif kind == "tanh":
            cap = 1.0
        else:
            multiplier, cap = multiplier / 4, 0.5
    if not all(math.isfinite(number) and number for number in (multiplier, cap or multiplier)):
        return None
    plain = math.isclose(multiplier, 1.0, rel_tol=1e-12)  # 1 / 30 * 30 is not quite 1
    return LossForm(None if plain else multiplier, cap, smoothing or None)
