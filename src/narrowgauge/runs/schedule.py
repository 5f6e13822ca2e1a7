"""The learning rate schedule of a run, and AdamW with its weight-decay groups.

factor(step) = (step + 1) / warmup                                              while step < warmup
             = floor + (1 - floor) * (1 + cos(pi * done)) / 2                   after it,
where done rises from 0 at the end of the warm-up to 1 at the last step
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

FLOOR = 0.1
"""Cosine decay ends at a tenth of the peak, as in GPT-3 and most models since."""


def compute_factor(step: int, steps: int, warmup: int, floor: float = FLOOR) -> float:
    """Compute the factor of the peak learning rate for update number ``step`` (from 0) of ``steps``."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


class Schedule:
    """Sets the learning rate of every parameter group before each update, in proportion to its initial rate."""

    def __init__(self, optimizer: Optimizer, steps: int, warmup: int) -> None:
        self._optimizer = optimizer
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._steps, self._warmup = steps, warmup

    def set(self, step: int) -> float:
        """Set the rates for update number ``step`` (from 0), and return the first group's."""
        now = compute_factor(step, self._steps, self._warmup)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * now
        return self._peaks[0] * now


def make_adamw(model: nn.Module, learning_rate: float, weight_decay: float) -> AdamW:
    """Make an AdamW that decays only matrices: norms, biases and other vectors have no redundancy to remove."""
    trained = [p for p in model.parameters() if p.requires_grad]  # parameters() yields a tied weight once
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=_can_fuse(trained))


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    if "fused" not in inspect.signature(AdamW).parameters:
        return False
    return all(p.device.type in ("cuda", "cpu") and torch.is_floating_point(p) for p in parameters)
