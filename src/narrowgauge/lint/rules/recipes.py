"""Rules about recipes that do not fit the model or the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from narrowgauge.findings import SERIOUS, Finding
from narrowgauge.lint.detector import ModelCheck, TrainingSetup
from narrowgauge.lint.rule import Rule

if TYPE_CHECKING:
    from torch.optim import Optimizer

KEEP_NAMES_NOTHING = Rule(
    name="keep-names-nothing",
    severity=SERIOUS,
    about="a pattern in the recipe's keep matches no module",
    why="the module that should stay in FP32 would not: narrowgauge refuses to train",
    fix="name modules by their path or class, with * and ?",
)
LEAN_OPTIMIZER = Rule(
    name="lean-optimizer",
    severity=SERIOUS,
    about="the recipe needs smaller optimizer states, which narrowgauge does not have for this optimizer",
    why="narrowgauge refuses to train it",
    fix="use torch.optim.AdamW or Muon, or a recipe with master=fp32 and moments=fp32",
)


class KeepPatterns(ModelCheck):
    """Checks that every pattern of keep matches a module."""

    def check(self, setup: TrainingSetup) -> Iterator[Finding]:
        paths = [path for path, _ in setup.model.named_modules() if path]
        for pattern in setup.recipe.keep:
            if not any(setup.matches(pattern, path) for path in paths):
                some = f"{', '.join(paths[:6])}{', ...' * (len(paths) > 6)}"
                detail = f"keep={pattern} matches no module; modules are {some}"
                yield KEEP_NAMES_NOTHING.finding(f"recipe {setup.recipe}", detail)


class LeanOptimizer(ModelCheck):
    """Checks that recipes with small optimizer states have an optimizer that can store them."""

    def check(self, setup: TrainingSetup) -> Iterator[Finding]:
        recipe, optimizer = setup.recipe, setup.optimizer
        narrows = recipe.master != "fp32" or recipe.moments != "fp32" or recipe.gradients != "fp32"
        if optimizer is not None and narrows and not _has_small_states(optimizer):
            yield LEAN_OPTIMIZER.finding("optimizer", f"{type(optimizer).__name__} with recipe {recipe}")


def _has_small_states(optimizer: Optimizer) -> bool:
    from narrowgauge.optim.convert_optimizer import can_convert

    return can_convert(optimizer)
