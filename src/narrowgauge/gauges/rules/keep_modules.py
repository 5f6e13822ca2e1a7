"""Chooses which modules a recommended recipe keeps in FP32, and writes the recipe so that ``recipe`` accepts it.

    activation, gradient, input   the module itself
    weight                        the module that has the parameter
    intermediate                  the module whose forward calls the function
    FP8, an activation            the linear layers that read it, or else the module that contains it

Code outside of modules, such as the loss, cannot be kept, nor can the whole model: the recipe is then ``bf16``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowgauge.gauges.watch.readings import Reading

if TYPE_CHECKING:  # reports read this file without torch
    from torch import nn

_KEPT = 8
"""If more modules than this fail, the format does not suit the model."""


@dataclass(frozen=True)
class ModelParts:
    """What a prediction must know about the modules of a model."""

    modules: frozenset[str] | None = None
    """The paths of all modules; None if they are not known."""
    linears: frozenset[str] | None = None
    """The paths of the layers that FP8 can multiply; None if they are not known."""
    stays_fp32: frozenset[str] = frozenset()
    """Modules whose output would be in FP32 under FP16 autocast."""
    read: frozenset[str] = frozenset()
    """Layers whose inputs were read."""
    no_fp8: str | None = None
    """Why no product would run in FP8; None if one would, or if the model is not known."""

    @staticmethod
    def from_model(model: nn.Module, history: Sequence[Sequence[Reading]], stays_fp32: Iterable[str]) -> ModelParts:
        """Describe a model and what was read of it."""
        from narrowgauge.gauges.watch.prediction_inputs import explain_no_fp8, is_linear

        named = dict(model.named_modules())
        linears = frozenset(path for path, module in named.items() if is_linear(module))
        return ModelParts(frozenset(named), linears, frozenset(stays_fp32), _find_read(history), explain_no_fp8(model))

    @staticmethod
    def from_readings(history: Sequence[Sequence[Reading]]) -> ModelParts:
        """Describe what readings alone tell."""
        return ModelParts(read=_find_read(history))

    def is_fp8(self, kind: str, name: str) -> bool:
        """Whether FP8 would hold a tensor."""
        if kind == "activation":  # read as the input of a layer, unless fused parts hide those
            return (self.linears is None and not self.read) or bool(self.linears and self.linears - self.read)
        if kind not in ("input", "gradient", "weight"):
            return False
        return self.linears is None or (name.removesuffix(".weight") if kind == "weight" else name) in self.linears


def make_recipe(format: str, failed: Iterable[tuple[str, str]], parts: ModelParts) -> str:
    """Return the format as a recipe that keeps what fails in FP32; ``bf16`` if that is too much or impossible.

    Args:
        format: fp16 or fp8.
        failed: The kind and place of each tensor that the format cannot hold.
        parts: What is known about the modules.
    """
    kept: dict[str, None] = {}
    for kind, place in failed:
        path = place.partition("\n")[0] if kind == "intermediate" else place
        if kind == "weight":
            path = path.rpartition(".")[0] if parts.modules is None else path
        if format == "fp8" and kind == "activation" and parts.linears is not None and path not in parts.linears:
            path = path.rpartition(".")[0]
        while parts.modules is not None and path and path not in parts.modules:
            path = path.rpartition(".")[0]
        kept[path] = None
    kept = {path: None for path in kept if not any(path.startswith(f"{other}.") for other in kept if other)}
    if not kept:
        return format
    if "" in kept or len(kept) > _KEPT:
        return "bf16"
    return f"{format}[keep={'+'.join(re.sub(r'[^A-Za-z0-9_.*?-]', '?', path) for path in kept)}]"


def _find_read(history: Sequence[Sequence[Reading]]) -> frozenset[str]:
    return frozenset(r.module for readings in history for r in readings if r.kind == "input")
