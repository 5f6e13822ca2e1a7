"""StepReport, the result of an engine's step, and Watcher, the interface of objects that follow an engine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class StepReport:
    """The result of ``Engine.step``. Reading a property waits for the device; keeping the report does not.

    Example:
        >>> report = engine.step()
        >>> if number % 100 == 0:
        ...     print(report.applied, report.grad_norm, report.loss_scale)
    """

    index: int
    """Number of the update, from 1. During an accumulation: the number it will have."""
    complete: bool
    """False during an accumulation, when the optimizers have not been stepped yet."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The scalars on the device: applied, grad_norm, loss_scale. Reading this dictionary does not wait."""

    @property
    def applied(self) -> bool:
        """Whether the weights were updated. False for a skipped update and during an accumulation."""
        return self.complete and bool(self.tensors["applied"].item())

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients, unscaled and before clipping. None during an accumulation."""
        return float(self.tensors["grad_norm"].item()) if self.complete else None

    @property
    def loss_scale(self) -> float:
        """The loss scale of this step. 1 if the recipe does not scale the loss."""
        return float(self.tensors["loss_scale"].item())


class Watcher(Protocol):
    """An object in ``Engine.watchers``. It must not wait for the device or change the training.

    It may have a method ``is_idle()``: whether ``around`` does nothing in the next step. Only then can the step run as
    a CUDA graph (``StepFunction``), which calls ``after`` alone.
    """

    def around(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Return a context that the engine enters for one phase of a step.

        Args:
            phase: ``forward``, ``backward`` (both per microbatch) or ``update``.
        """

    def after(self, report: StepReport) -> None:
        """Called after each update, applied or skipped.

        Args:
            report: The update's report.
        """


def is_idle(watcher: Watcher) -> bool:
    """Return whether a watcher says that it does nothing around the phases of the next step."""
    ask = getattr(watcher, "is_idle", None)
    return ask is not None and bool(ask())
