"""Evaluates a task: sums of the loss and the metrics over batches, with gradients if the loss needs them.

Evaluation runs without gradients, which saves memory. A loss that contains gradients itself (a physics-informed
network, a gradient penalty) then raises an error. It is evaluated again with gradients, and from then on always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from narrowgauge import random_state
from narrowgauge.engine import Engine
from narrowgauge.task import Task

NO_GRADIENT = "not require grad"
"""Part of the messages with which autograd refuses to compute gradients under no_grad."""


class Evaluation:
    """Evaluates one task with one engine. Weights, gradients and random generators stay as they were."""

    def __init__(self, engine: Engine, task: Task, notify: Callable[[str], None]) -> None:
        self._engine, self._task, self._notify = engine, task, notify
        self._with_gradients = False

    def sum(self, make_batches: Callable[[], Iterable[Any]]) -> dict[str, Tensor]:
        """Return the sums of the loss and of each metric over the batches.

        Args:
            make_batches: Returns the batches, on the engine's device. It may be called twice.
        """
        if not self._with_gradients:
            try:
                return self._sum(make_batches())
            except RuntimeError as error:
                if NO_GRADIENT not in str(error):
                    raise
            self._with_gradients = True
            self._notify("the loss computes gradients itself: it is evaluated with gradients, which needs more memory")
        return self._sum(make_batches())

    def _sum(self, batches: Iterable[Any]) -> dict[str, Tensor]:
        engine, task = self._engine, self._task
        sums: dict[str, Tensor] = {}
        gradients = torch.enable_grad() if self._with_gradients else nullcontext()
        with random_state.preserve(), engine.evaluating(), gradients:
            for batch in batches:
                values = {"loss": task.loss(engine.model, batch)}
                if task.metrics is not None:
                    values |= task.metrics(engine.model, batch)
                for name, value in values.items():
                    sums[name] = sums[name] + value.detach().double() if name in sums else value.detach().double()
        return sums
