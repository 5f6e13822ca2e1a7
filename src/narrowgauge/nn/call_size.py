"""The size of a block's calls, which memory is planned for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class CallSize:
    """How large the inputs of a block were, and for which size its memory was planned."""

    shape: tuple[int, ...] = ()
    """The shape of the largest input in training so far."""
    largest: int = 0
    """Its number of values."""
    itemsize: int = 4
    """Bytes of one of its values."""
    latest: int = 0
    """The number of values of the latest input in training."""
    of_step: int = 0
    """The number of values of the largest input since ``begin_step``: a step may have calls of several sizes."""
    is_training: bool = True
    """Whether the latest call was one in training."""
    planned: int | None = None
    """The number of values that a plan counts on; None: there is no plan."""

    def begin_step(self) -> None:
        """Forget the inputs of the step before."""
        self.of_step = 0

    def exceeds_plan(self, x: Any) -> bool:
        """Note an input; return whether it is larger than planned. Forwards without gradients keep nothing."""
        self.is_training = torch.is_grad_enabled()
        if not isinstance(x, Tensor) or not self.is_training:
            return False
        self.latest = x.numel()
        self.of_step = max(self.of_step, self.latest)
        if self.latest > self.largest:
            self.shape, self.largest, self.itemsize = tuple(x.shape), self.latest, x.itemsize
        return self.planned is not None and self.latest > self.planned
