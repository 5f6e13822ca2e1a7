"""The rule about dimensions that are not multiples of what tensor cores need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from narrowgauge.findings import NOTE, WARNING, Finding
from narrowgauge.lint.detector import Detector, ModelCheck, TrainingSetup, more_like_it
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.values import Const, Module, Value
from narrowgauge.lint.padding import UNALIGNED, multiple_for, padded, saved
from narrowgauge.lint.rule import Rule

if TYPE_CHECKING:
    from torch import nn

OFF_MULTIPLE = Rule(
    name="off-multiple",
    severity=WARNING,
    about="a dimension that is not a multiple of what tensor cores need",
    why="matrix products need rows of 16 bytes: multiples of 8 in FP16 and BF16; FP8 accepts only multiples of 16",
    fix="pad the dimension",
    advice=True,
)
SCRIPT_LEAST, SCRIPT_LARGE = 256, 1024
"""In scripts, dimensions below the first are not reported; from the second on they are a warning, else a note."""
MODEL_LEAST = 64
"""In models, dimensions below this are not reported: they are a fraction of a tile and cost little."""
WORTH = 0.005
"""Fraction of the time in matrix products above which padding is worth a warning."""
DIMENSIONS = {
    "Linear": ("in_features", "out_features"),
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), ("in_channels", "out_channels")),
}
"""Layers, and the arguments that are dimensions of matrix products."""


class LayerDimensions(Detector):
    """Checks dimensions that a script passes to layers as literals."""

    def on_result(self, call: Call, value: Value | None) -> None:
        if not call.name.startswith("torch.nn.") or not isinstance(value, Module):
            return
        kind = call.name.split(".")[-1]
        for position, keyword in enumerate(DIMENSIONS.get(kind, ())):
            size = call.arg(position, keyword)
            if isinstance(size, Const) and isinstance(size.value, int):
                self.context.event(f"dimension-{position}", call.node, value=size, text=f"{kind}'s {keyword}")

    def on_end(self) -> None:
        if not self.observations.computes_low:
            return
        multiple = 16 if "fp8" in self.observations.formats else 8
        for event in self.observations.of("dimension-0", "dimension-1"):
            size = event.value.value if isinstance(event.value, Const) else None
            if isinstance(size, int) and size >= SCRIPT_LEAST and size % multiple:
                detail = f"{event.text} is {size:,}, not a multiple of {multiple}"
                best = padded(size)
                added = (best - size) / size
                fix = f"pad it to {best:,} ({added:.2%} more)"
                self.judge(OFF_MULTIPLE, event.node, True, detail, fix, "" if size >= SCRIPT_LARGE else NOTE)


@dataclass
class Misfit:
    """Layers with the same unsuitable dimension."""

    paths: list[str] = field(default_factory=list)
    weights: int = 0
    is_tied: bool = False
    """Whether the first layer shares its weight with an embedding."""


class ModelDimensions(ModelCheck):
    """Checks the layers of a model, and predicts what padding would save."""

    def check(self, setup: TrainingSetup) -> Iterator[Finding]:
        from torch import nn

        multiple = multiple_for(setup.recipe.compute)
        if multiple is None:
            return
        groups: dict[tuple[str, int], Misfit] = {}
        total = 0
        embeddings = {id(module.weight) for module in setup.model.modules() if isinstance(module, nn.Embedding)}
        for path, module, inputs, outputs in _products(setup.model):
            weight = next(iter(module.parameters(recurse=False)))
            total += weight.numel()
            if setup.keeps_in_fp32(path):
                continue
            for kind, size in (("inputs", inputs), ("outputs", outputs)):
                if size % multiple and size >= MODEL_LEAST:
                    misfit = groups.setdefault((kind, size), Misfit(is_tied=id(weight) in embeddings))
                    misfit.paths.append(path)
                    misfit.weights += weight.numel()
        for (kind, size), misfit in groups.items():
            share = misfit.weights / total
            stays = "; FP8 does not accept it, so it stays in BF16" if setup.recipe.compute == "fp8" else ""
            detail = (
                f"{size:,} {kind} are not a multiple of {multiple}{more_like_it(len(misfit.paths))}{stays}; "
                f"{share:.0%} of the weights in matrix products"
            )
            fix, gain = _padding(size, share, setup.recipe.compute, misfit.is_tied)
            yield OFF_MULTIPLE.finding(misfit.paths[0], detail, fix, "" if gain >= WORTH else NOTE)


def _padding(size: int, share: float, compute: str, is_tied: bool) -> tuple[str, float]:
    """Return the fix, and the fraction of the time in matrix products that it saves."""
    gain, best = saved(share, size, compute), padded(size)
    rate = "" if compute == "fp8" else f" (unaligned ones run at {UNALIGNED:g} of the rate on an H200)"
    both = ", together with the embedding that shares the weight" if is_tied else ""
    added = best / size - 1
    less = f"a predicted {gain:.0%} less time in matrix products{rate}"
    return f"pad to {best:,}{both}: {added:.2%} more, and {less}", gain


def _products(model: nn.Module) -> Iterator[tuple[str, nn.Module, int, int]]:
    """Yield the layers that multiply matrices: path, module, inputs, outputs."""
    from torch import nn

    from narrowgauge.nn.products.linear import get_weight_shape, is_linear

    for path, module in model.named_modules():
        if is_linear(module) or isinstance(module, nn.Linear):
            outputs, inputs = get_weight_shape(module)
            yield path, module, inputs, outputs
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1:
            yield path, module, module.in_channels, module.out_channels
