"""Lints a training setup: modules, parameters, optimizer and recipe. Nothing is computed.

A model on the meta device is enough: only names, shapes and formats are read.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from narrowgauge.findings import Finding
from narrowgauge.lint.detector import TrainingSetup
from narrowgauge.lint.rules import MODEL_CHECKS
from narrowgauge.recipe import Recipe


def check(model: nn.Module, optimizer: Optimizer | None, recipe: Recipe) -> list[Finding]:
    """Return the findings in a model, the optimizer that updates it, and the recipe that trains it."""
    setup = TrainingSetup(model, optimizer, recipe)
    return [finding for kind in MODEL_CHECKS for finding in kind().check(setup)]
