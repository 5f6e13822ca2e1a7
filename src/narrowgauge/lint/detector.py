"""Base classes of detectors: of pitfalls in scripts (``Detector``), and in models and recipes (``ModelCheck``)."""

from __future__ import annotations

import ast
import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowgauge.findings import Finding
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.observer import Observer
from narrowgauge.lint.rule import Rule
from narrowgauge.lint.verdicts import Verdicts

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from narrowgauge.recipe import Recipe


class Detector(Observer):
    """Finds pitfalls while the interpreter follows a script.

    A subclass overrides methods of ``Observer`` and calls ``judge``. It needs no registration: every subclass in a
    module of ``narrowgauge.lint.rules`` runs on every script.

    Args:
        context: where the interpreter is.
        verdicts: where the verdicts of all detectors are collected.
    """

    def __init__(self, context: Context, verdicts: Verdicts) -> None:
        self.context, self.verdicts, self.observations = context, verdicts, context.observations

    def judge(
        self, rule: Rule, node: ast.AST, bad: bool = True, detail: str = "", fix: str = "", severity: str = ""
    ) -> None:
        """Record the verdict of the current path on a place in the script; ``bad=False`` if the path does it right."""
        self.verdicts.judge(rule, node, bad, detail, fix, severity)


@dataclass(frozen=True)
class TrainingSetup:
    """A model, the optimizer that updates it, and the recipe that trains it."""

    model: nn.Module
    optimizer: Optimizer | None
    recipe: Recipe

    def keeps_in_fp32(self, path: str) -> bool:
        """Return whether the recipe keeps a module, or one that contains it, in FP32."""
        parts = path.split(".")
        owners = [".".join(parts[: index + 1]) for index in range(len(parts))]
        return any(self.matches(pattern, owner) for pattern in self.recipe.keep for owner in owners if owner)

    def matches(self, pattern: str, path: str) -> bool:
        """Return whether a pattern of the recipe's keep names a module, by path or class."""
        kind = type(self.model.get_submodule(path)).__name__
        return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(kind, pattern)


class ModelCheck(ABC):
    """Finds pitfalls in a training setup, from names, shapes and formats alone: the model may be on the meta device.

    Like ``Detector``, it needs no registration. Import torch inside methods: scripts are linted without it.
    """

    @abstractmethod
    def check(self, setup: TrainingSetup) -> Iterator[Finding]:
        """Yield the findings in a training setup."""


def more_like_it(count: int) -> str:
    """Return how many more cases there are than the one that is named."""
    return f" ({count - 1} more like it)" if count > 1 else ""
