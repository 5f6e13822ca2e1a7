"""Decides which modules with stacked experts compute in FP8, and which as one function in BF16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from narrowgauge.kernels.experts import wide
from narrowgauge.kernels.experts.products import ALIGNMENT
from narrowgauge.nn.experts.find import ExpertsSpec, find_experts, list_stacks
from narrowgauge.nn.matrix_inventory import explain_kept_fp32
from narrowgauge.nn.products.choose_formats import Decision
from narrowgauge.nn.products.gemm import ALL_BF16, ALL_FP8
from narrowgauge.nn.survey import Layer
from narrowgauge.nn.wide_forwards import FIRST_FORWARD, list_first_blocks
from narrowgauge.recipe import Recipe

GRANULARITY = "experts have one scale for each tensor, and the recipe has more than one"


def survey_experts(model: nn.Module, recipe: Recipe) -> tuple[list[Layer], dict[str, ExpertsSpec]]:
    """Return an entry for each stack of matrices, and the modules that compute in FP8 by path."""
    if recipe.compute != "fp8":
        return [], {}
    found, modules = find_experts(model), dict(model.named_modules())
    first = tuple(list_first_blocks(model, recipe.first_forward))
    layers: list[Layer] = []
    specs: dict[str, ExpertsSpec] = {}
    for path, spec in found.specs.items():
        reason = explain_kept_fp32(modules, path, recipe) or _explain_misfit(spec, recipe)
        wide = _list_wide(modules[path], spec, recipe.first_forward) if path.startswith(first) else ()
        layers += _list_layers(path, spec, reason, wide)
        if reason is None:
            specs[path] = spec
    for path, reason in found.reasons.items():
        for name, stack in list_stacks(modules[path]).items():
            layers.append(Layer(f"{path}.{name}", (stack.shape[1], stack.shape[2]), "experts", ALL_BF16, reason))
    return layers, specs


def survey_wide_experts(model: nn.Module, recipe: Recipe, others: Mapping[str, ExpertsSpec]) -> dict[str, ExpertsSpec]:
    """Return the modules that compute as one function in BF16, by path: those that fit, without the ``others``."""
    if recipe.compute not in ("bf16", "fp8"):
        return {}
    modules = dict(model.named_modules())
    return {
        path: spec
        for path, spec in find_experts(model).specs.items()
        if path not in others
        and explain_kept_fp32(modules, path, recipe) is None
        and not any(size % wide.ALIGNMENT for size in (spec.width, spec.inner))
    }


def _explain_misfit(spec: ExpertsSpec, recipe: Recipe) -> str | None:
    if recipe.granularity != "tensor":
        return GRANULARITY
    for name, size in (("inputs", spec.width), ("inner columns", spec.inner)):
        if size % ALIGNMENT:
            return f"{size} {name} are not a multiple of {ALIGNMENT}, which grouped FP8 products need"
    return None


def _list_wide(module: nn.Module, spec: ExpertsSpec, first_forward: str) -> tuple[str, ...]:
    """Return the stacks of the first block that multiply in BF16 in forward; auto leaves out frozen ones."""
    stacks = (spec.gate_up, spec.down) if first_forward == "bf16" else (spec.gate_up,)
    return tuple(name for name in stacks if first_forward != "auto" or getattr(module, name).requires_grad)


def _list_layers(path: str, spec: ExpertsSpec, reason: str | None, wide: Sequence[str]) -> Iterator[Layer]:
    shapes = {spec.gate_up: (2 * spec.inner, spec.width), spec.down: (spec.width, spec.inner)}
    for name, shape in shapes.items():
        if reason is None:
            decision = Decision(ALL_FP8, "products of experts run in FP8, grouped")
            if name in wide:
                decision = replace(decision, choice=ALL_FP8._replace(output="bf16"), reason=FIRST_FORWARD)
            yield Layer(f"{path}.{name}", shape, "experts", decision.choice, decision.reason, decision)
        else:
            yield Layer(f"{path}.{name}", shape, "experts", ALL_BF16, reason)
