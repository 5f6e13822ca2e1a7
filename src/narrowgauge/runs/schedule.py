"""The learning rate schedule of a run.

factor(step) = (step + 1) / warmup                                              while step < warmup
             = floor + (1 - floor) * (1 + cos(pi * done)) / 2                   after it,
where done rises from 0 at the end of the warm-up to 1 at the last step
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.optim import Optimizer

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

    def __init__(self, optimizers: Sequence[Optimizer], steps: int, warmup: int) -> None:
        self._optimizers = optimizers
        self._peaks = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
        self._steps, self._warmup = steps, warmup

    def set(self, step: int) -> float:
        """Set the rates for update number ``step`` (from 0), and return the first group's."""
        now = compute_factor(step, self._steps, self._warmup)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, self._peaks, strict=True):
            group["lr"] = peak * now
        return self._peaks[0] * now
