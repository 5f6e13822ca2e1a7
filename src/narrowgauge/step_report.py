"""StepReport: what an engine's step did; and Watcher: who is told of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class StepReport:
    """What a step did. Reading a field waits for the device; holding the report does not."""

    index: int
    """Which update this was (or will be, in the middle of an accumulation), counted from 1."""
    complete: bool
    """False in the middle of an accumulation, when nothing was stepped yet."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The raw scalars on the device: applied, grad_norm, loss_scale."""

    @property
    def applied(self) -> bool:
        """Whether the weights were updated: False for a skipped update and in the middle of an accumulation."""
        return self.complete and bool(self.tensors["applied"].item())

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients, unscaled and before clipping."""
        return float(self.tensors["grad_norm"].item()) if self.complete else None

    @property
    def loss_scale(self) -> float:
        """The factor the loss was scaled by in this step (1 where the recipe scales nothing)."""
        return float(self.tensors["loss_scale"].item())


class Watcher(Protocol):
    """Who is told what an engine does; without waiting for the device, and without changing anything."""

    def around(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Entered before a microbatch's ``forward`` and ``backward`` and before an ``update``, left after it."""

    def after(self, report: StepReport) -> None:
        """An update is done, or was skipped."""
