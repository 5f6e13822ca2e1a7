"""Which fused blocks run as they were written, and why: told once as a warning, and kept for the conversion report."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch

from narrowgauge.errors import SlowRecipeWarning


@dataclass
class AsWritten:
    """What the blocks of a model share about calls in training that did not run fused.

    Attributes:
        reasons: Paths of the blocks whose latest call in training ran as written, each with the reason.
        told: What the user was warned of.
    """

    reasons: dict[str, str] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    def note(self, path: str, name: str, reason: str) -> None:
        """Note a call, unless it is without gradients. Warn once for each ``name``."""
        if not torch.is_grad_enabled():
            return
        self.reasons[path] = reason
        if name not in self.told:
            self.told.add(name)
            warnings.warn(
                f"{path} and blocks like it run as they were written, without FP8, {reason}",
                SlowRecipeWarning,
                stacklevel=5,
            )

    def note_fused(self, path: str) -> None:
        """Note a call that runs fused."""
        if self.reasons and torch.is_grad_enabled():
            self.reasons.pop(path, None)

    def explain(self) -> list[str]:
        """Return one line for each reason, with the blocks it holds for."""
        return group_by_reason("ran as written", self.reasons)


def group_by_reason(what: str, reasons: dict[str, str]) -> list[str]:
    """Return one line for each reason, with the paths that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        by_reason.setdefault(reason, []).append(path)
    return [
        f"{what}: {paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: {reason}"
        for reason, paths in by_reason.items()
    ]
