"""What predictions need besides the statistics of modules: inputs of layers, large results of functions, FP8 layers.

The input of a layer is usually the output of a watched module and read there. Only others are read again: data, and
what functions have computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.weak import WeakIdKeyDictionary

from narrowgauge.gauges.watch.autocast_flow import AutocastFlow
from narrowgauge.gauges.watch.readings import Reading
from narrowgauge.hardware import detect
from narrowgauge.nn.matrix_inventory import LayerUse, Matrix, list_matrices
from narrowgauge.nn.survey import survey_layers
from narrowgauge.recipe import parse

_WORTH_NOTING = 256.0
"""Results of functions below this are nowhere near the limit of FP16, also after growing 250 times."""
_REASONS = 3
"""How many reasons are listed why nothing runs in FP8."""


class LayerInputs:
    """Notes for each layer which module computed its input, during one forward."""

    def __init__(self) -> None:
        self._outputs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.sources: dict[str, str] = {}
        """By layer, the module whose output it reads."""
        self.stays_fp32: set[str] = set()

    def needs_reading(self, path: str, module: nn.Module, inputs: Any) -> bool:
        """Whether the input of a layer must be read, because no module has computed it."""
        x = inputs[0] if inputs else None
        if not isinstance(module, nn.Linear | _ConvNd) or not isinstance(x, Tensor):
            return False
        if x in self._outputs and path not in self.sources:
            self.sources[path] = self._outputs[x]
            return False
        return True

    def add_output(self, path: str, output: Any, flow: AutocastFlow) -> None:
        """Note the output of a module."""
        if isinstance(output, Tensor) and output.is_floating_point():
            self._outputs[output] = path
            if flow.is_half(output):
                self.stays_fp32.discard(path)
            else:
                self.stays_fp32.add(path)


def separate_extra(
    readings: Sequence[Reading], facts: Mapping[tuple[str, str], float], inputs: LayerInputs
) -> tuple[list[Reading], list[Reading], dict[tuple[str, str], float]]:
    """Return the readings of modules and parameters, those for predictions, and the facts that remain."""
    own = [one for one in readings if one.kind != "input"]
    extra = [one for one in readings if one.kind == "input"]
    activations = {one.module: one for one in own if one.kind == "activation"}
    for layer, source in inputs.sources.items():
        if source in activations:
            extra.append(dataclasses.replace(activations[source], kind="input", module=layer))
    for (name, place), value in facts.items():
        if name == "intermediate" and value > _WORTH_NOTING:
            extra.append(Reading(kind="intermediate", module=place, dtype="fp32", count=1, amax=value))
    return own, extra, {key: value for key, value in facts.items() if key[0] != "intermediate"}


def is_linear(module: nn.Module) -> bool:
    """Whether FP8 can run the products of a module: a linear layer whose sides are multiples of 16."""
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) and isinstance(weight, torch.Tensor) and all(n % 16 == 0 for n in weight.shape)


def explain_no_fp8(model: nn.Module) -> str | None:
    """Return why no product of a model would run in FP8, or None if one would or might.

    Nothing is computed: of several ranks, only the first one calls this.
    """
    layers = survey_layers(model, parse("fp8[products=all]"), detect("cpu"), rows=1, specs={}, lazy=False)
    surveyed = {layer.path: LayerUse("linear", tuple(layer.choice), layer.reason) for layer in layers}
    matrices = [one for one in list_matrices(model, parse("fp8"), surveyed) if one.formats]
    if any("fp8" in one.formats or _may_fit(one) for one in matrices):
        return None
    by_reason: dict[str, list[str]] = {}
    for one in sorted(matrices, key=lambda one: -one.size):
        by_reason.setdefault(one.reason.partition("; shared with ")[0], []).append(one.path)
    reasons = [
        f"{reason} ({paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''})"
        for reason, paths in by_reason.items()
    ]
    more = [f"and {len(reasons) - _REASONS} more reasons"] if len(reasons) > _REASONS else []
    return "; ".join([*reasons[:_REASONS], *more]) or "no parameter is multiplied"


def _may_fit(matrix: Matrix) -> bool:
    """Whether a matrix is of a kind that only fused blocks and experts multiply in FP8, and has a suitable shape."""
    return matrix.kind in ("attention", "experts") and all(size % 16 == 0 for size in matrix.shape[-2:])
