"""Converts a model to a recipe: finds layers that gain, changes how they compute, and reports each layer.

The model's parameters keep their names, shapes and identity: a converted model saves and loads the checkpoints of an
unconverted one. Conversion looks for, in this order:

    blocks    transformer blocks, recognized by what they compute (blocks/find.py): computed as one function
              (fused/blocks.py)
    head      a model that ends in ``finish(x, targets)`` with norm and lm_head: head and loss as one (fused/head.py)
    trunk     a model whose ``trunk(x, targets, ...)`` runs such blocks and then ``finish``: a chain (fused/blocks.py)
    experts   stacked experts of a mixture, in FP8 (experts/run.py)
    linears   every other nn.Linear (or transformers' Conv1D): converted one by one (products/linear.py); FP8 only
    embeddings  nn.Embedding: only its gradient is computed differently (fused/embedding.py)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from narrowgauge.hardware import Device, Gpu, detect
from narrowgauge.nn.blocks.settings import OwnSettings
from narrowgauge.nn.blocks.spec import BlockSpec, NormSpec
from narrowgauge.nn.experts.find import ExpertsSpec
from narrowgauge.nn.experts.modules import FusedExperts, WideExperts
from narrowgauge.nn.experts.plan import make_experts_plan
from narrowgauge.nn.experts.routers import explain_router, find_routers, keep_routers
from narrowgauge.nn.experts.survey import survey_experts, survey_wide_experts
from narrowgauge.nn.fusable_blocks import describe_again, find_fusable_blocks
from narrowgauge.nn.fused import embedding
from narrowgauge.nn.fused.as_written import AsWritten, group_by_reason
from narrowgauge.nn.fused.graphs import BlockGraphs
from narrowgauge.nn.fused.head_modules import FusedHead, FusedTrunk, LazyHead
from narrowgauge.nn.fused.make_plan import make_plan
from narrowgauge.nn.fused.modules import FusedBlock, mark_parts
from narrowgauge.nn.fused.norm import convert_norm, find_other_norms
from narrowgauge.nn.matrix_inventory import LayerUse, Matrix, list_matrices
from narrowgauge.nn.matrix_inventory_text import summarize, tabulate
from narrowgauge.nn.module_changes import apply_change, find_change, has_own_method
from narrowgauge.nn.own_positions import skip_search
from narrowgauge.nn.predict_speed import Speed, predict_speed
from narrowgauge.nn.products import linear
from narrowgauge.nn.products.emulated import emulate_layers, find_layers
from narrowgauge.nn.products.stored_fp8 import get_stored_scale, share_stored, store_in_fp8
from narrowgauge.nn.speed_advice import explain_slow, warn_about_speed
from narrowgauge.nn.survey import (
    Layer,
    find_input_leaders,
    get_granularity,
    get_norm_kind,
    list_backward_sites,
    list_sites,
    list_stored_groups,
    survey_layers,
)
from narrowgauge.recipe import SHORT, Recipe, parse
from narrowgauge.scaling.tensor import TensorScales
from narrowgauge.weight_copies.casts import WeightCastPlan

DEFAULT_ROWS = 16384
"""Default number of tokens per step; the choice of formats depends little on it."""


@dataclass
class Conversion:
    """The report of a conversion, and the FP8 scales that the engine updates after each step.

    ``print(conversion)`` lists every matrix of the model with its formats and the reason; ``summary()`` is one line.

    Attributes:
        layers: One entry per linear layer: path, shape, formats of its three products, and the reason.
        scales: The FP8 scales; None if no product runs in FP8.
        blocks: Paths of the transformer blocks that run as one fused function.
        unfused: Paths of other repeated modules, and why they are not fused.
        shared_input: The cast that layers with a common input share within a forward.
        compute: The recipe's compute format.
        matrices: Every parameter of two or more dimensions, with the formats it is multiplied in.
        stored: Paths of the layers whose frozen weights are stored in FP8.
        experts: Descriptions of the modules with experts that compute in FP8, by path.
        wide_experts: The same of those that compute as one function in BF16.
        gpu: The GPU that the formats were chosen for; None for a CPU, and for a GPU that is not in the table.
        as_written: Which fused blocks ran as they were written in their latest call in training, and why.
    """

    layers: list[Layer] = field(default_factory=list)
    scales: TensorScales | None = None
    blocks: list[str] = field(default_factory=list)
    unfused: dict[str, str] = field(default_factory=dict)
    shared_input: linear.SharedInputCast = field(default_factory=linear.SharedInputCast)
    compute: str = "fp32"
    matrices: list[Matrix] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    experts: dict[str, ExpertsSpec] = field(default_factory=dict)
    wide_experts: dict[str, ExpertsSpec] = field(default_factory=dict)
    gpu: Gpu | None = None
    as_written: AsWritten = field(default_factory=AsWritten)

    @property
    def returns_bf16(self) -> bool:
        """Whether parts of the model return BF16 even if autocast is off, which other layers may not accept."""
        return self.scales is not None or self.compute in SHORT or bool(self.blocks or self.wide_experts)

    def summary(self) -> str:
        """Return one line: the share of the model that is multiplied in the recipe's format, and the rest's formats."""
        written = f" ({len(self.as_written.reasons)} ran as written)" if self.as_written.reasons else ""
        fused = f", {len(self.blocks)} blocks fused{written}" if self.blocks else ""
        head = f"{self.compute.upper()} {'(emulated) ' if self.compute in SHORT else ''}in "
        if self.compute == "fp8":
            count = sum(layer.choice.count("fp8") for layer in self.layers)
            head += f"{count} of {3 * len(self.layers)} products of {len(self.layers)} layers{fused}: "
            fused = ""
        stored = f"; {len(self.stored)} frozen weights stored in FP8" if self.stored else ""
        return head + summarize(self.matrices, self.compute, fused) + stored

    def __str__(self) -> str:
        return "\n".join([tabulate(self.matrices), *self.explain_unfused(), *self.as_written.explain()])

    def predict_speed(self, compiled: bool = False) -> Speed | None:
        """Predict the speed relative to BF16 with torch.compile; None if the GPU is unknown, or nothing is multiplied.

        Args:
            compiled: Whether torch.compile compiles what is not fused.
        """
        if self.gpu is None:
            return None
        decided = {layer.path: layer.decision for layer in self.layers if layer.decision and layer.decision.bf16_ms}
        measured = {path: decision.chosen_ms / decision.bf16_ms for path, decision in decided.items()}
        return predict_speed(self.matrices, self.gpu, compiled=compiled, measured=measured)

    def explain_unfused(self) -> list[str]:
        """Return one line for each reason why repeated modules run layer by layer, with the modules it holds for."""
        return group_by_reason("not fused", self.unfused)


def convert(
    model: nn.Module,
    recipe: str | Recipe = "fp8",
    device: Device | None = None,
    rows: int = DEFAULT_ROWS,
    *,
    compile: bool = False,
    cuda_graphs: bool | None = None,
) -> Conversion:
    """Convert a model in place, so that its layers compute in the recipe's formats.

    Layers convert only if that is faster (``products=fastest``) and possible: FP8 products need dimensions that are
    multiples of 16. Parameters, their names and the state dictionary do not change. ``Engine`` calls this
    function. Call it directly only to inspect a conversion or to write your own training loop.

    Args:
        model: The model to convert.
        recipe: A recipe, or its text, such as "fp8" or "bf16[keep=lm_head]".
        device: The device to choose formats for; by default that of the model's parameters.
        rows: Tokens or samples that a linear layer sees per step.
        compile: Whether you compile the model afterwards. This changes no format, only the predicted speed (a warning
            tells if FP8 is not expected to make the model faster), and that logits are computed as the model does it.
        cuda_graphs: Whether fused blocks run as CUDA graphs; by default if the GPU waits for the host.

    Returns:
        The report, with the FP8 scales.

    Raises:
        UsageError: The recipe is invalid, or does not run on the device.
    """
    result = convert_layers(model, recipe, device, rows, cuda_graphs, one_graph=compile)
    warn_about_speed(explain_slow(result, compiled=compile, can_compile=True), stacklevel=3)
    return result


def convert_layers(
    model: nn.Module,
    recipe: str | Recipe,
    device: Device | None = None,
    rows: int = DEFAULT_ROWS,
    cuda_graphs: bool | None = None,
    one_graph: bool = False,
) -> Conversion:
    """Convert a model as ``convert`` does, without a word about its speed.

    ``one_graph``: torch.compile will compile the whole model if no block is fused, its head and loss included.
    """
    device = device or detect(str(next(model.parameters()).device))
    recipe = parse(recipe, device)
    result, specs = _plan(model, recipe, device, rows, one_graph)
    if recipe.emulate != "none":
        emulate_layers(model, recipe)
    if recipe.compute not in ("fp8", "bf16") or recipe.emulate != "none":
        return result
    keep_routers(model)
    skip_search(model)
    for group in list_stored_groups(model, recipe, result.layers, specs):
        store_in_fp8([model.get_submodule(path) for path in group])
        result.stored += group
    share_stored(model, [model.get_submodule(path) for path in result.stored])
    leaders = find_input_leaders(result.layers)
    fp8_layers = [layer for layer in result.layers if "fp8" in layer.choice]
    own = {f"{path}.weight" for path in result.stored}  # they have their scales
    listed = [(layer, site) for layer in fp8_layers for site in list_sites(layer, leaders, recipe)]
    sites = {name: dtype for _, (name, dtype) in listed if name not in own}
    granularity = {name: get_granularity(layer, recipe) for layer, (name, _) in listed}
    scales = None
    if sites:
        scales = result.scales = TensorScales(
            sites,
            next(model.parameters()).device,
            mode=recipe.scaling,
            history=recipe.history,
            margin=recipe.margin,
            amax=recipe.amax,
            in_backward={name for layer in result.layers for name in list_backward_sites(layer)},
            granularity=granularity,
            changeable=_list_changeable(sites, recipe),
        )
    by_path = {layer.path: layer for layer in result.layers}
    graphs = BlockGraphs(cuda_graphs)
    lazy = any(layer.part_of == "lazy head" for layer in result.layers)
    other_norms = find_other_norms(model, specs) if lazy else {}
    for path, module in model.named_modules():
        if path in specs:
            spec = specs[path]
            holds = recipe.gradients != "released"
            options = recipe.checkpoint, is_lean(recipe), holds, recipe.activations, recipe.offload == "activations"
            plan = make_plan(module, path, spec, by_path, scales, *options)
            mark_parts(module, spec)
            apply_change(module, FusedBlock(plan, graphs, result.as_written, describe_again))
        elif path in result.experts and scales is not None:
            of = result.experts[path]
            wide = tuple(by_path[f"{path}.{name}"].choice.output == "bf16" for name in (of.gate_up, of.down))
            of_experts = make_experts_plan(module, path, of, scales, is_lean(recipe), *wide)
            apply_change(module, FusedExperts(of_experts, OwnSettings.of(module)))
        elif path in result.wide_experts:
            apply_change(module, WideExperts(path, result.wide_experts[path], OwnSettings.of(module)))
        elif path in by_path and by_path[path].part_of == "linear":
            leader = leaders.get(path, path)
            readers = max(1, sum(one == leader for one in leaders.values()))
            _convert_linear(module, by_path[path], scales, recipe, f"{leader}.input", result.shared_input, readers)
        elif path in other_norms:
            convert_norm(module, other_norms[path])
        elif embedding.fits(module):
            embedding.convert_embedding(module)
        elif path in by_path and by_path[path].part_of == "lazy head":
            site = scales.sites.get(f"{path}.weight") if scales is not None else None
            weight = WeightCastPlan.of(
                cast(Any, module).weight, site=site, scales=scales, lean=is_lean(recipe), path=path,
                stored_scale=get_stored_scale(module),
            )  # fmt: skip
            apply_change(module, LazyHead(weight, by_path[path].choice))
    if "lm_head" in by_path and by_path["lm_head"].part_of == "head":
        end, whole = by_path["lm_head"], cast(Any, model)
        site = scales.sites.get("lm_head.weight") if scales is not None else None
        weight = WeightCastPlan.of(whole.lm_head.weight, site=site, scales=scales, lean=is_lean(recipe), path="lm_head")
        norm = NormSpec("norm", get_norm_kind(whole.norm) or "layer", whole.norm.eps)
        apply_change(model, FusedHead(weight, end.choice, norm))
        chained = hasattr(model, "trunk") and not has_own_method(model, "trunk")
        adapted = any(spec.adapters for spec in specs.values())  # a chain does not look whether they have changed
        if chained and not adapted and all(find_change(block, FusedBlock) for block in getattr(model, "blocks", ())):
            apply_change(model, FusedTrunk(weight, end.choice, norm))
    return result


def _list_changeable(sites: Iterable[str], recipe: Recipe) -> list[str]:
    """Return the sites whose format is chosen while the model trains."""
    return [name for name in sites if name.endswith(".grad_output")] if recipe.gradients_format == "auto" else []


def find_stored_groups(model: nn.Module, recipe: Recipe, device: Device) -> list[list[str]]:
    """Return the paths of the layers whose weights a conversion stores in FP8, those with one scale together."""
    if recipe.frozen != "fp8":
        return []
    result, specs = _plan(model, recipe, device, DEFAULT_ROWS, False)
    return list_stored_groups(model, recipe, result.layers, specs)


def plan_conversion(model: nn.Module, recipe: Recipe, device: Device) -> Conversion:
    """Return the report of a conversion without converting the model, and so without FP8 scales."""
    return _plan(model, recipe, device, DEFAULT_ROWS, False)[0]


def _plan(
    model: nn.Module, recipe: Recipe, device: Device, rows: int, one_graph: bool
) -> tuple[Conversion, dict[str, BlockSpec]]:
    """Decide how each layer computes. Return the report, and the blocks to fuse by path."""
    if recipe.emulate != "none":
        rounded = list_matrices(model, recipe, find_layers(model, recipe))
        return Conversion(compute=recipe.emulate, matrices=rounded, gpu=device.gpu), {}
    if recipe.compute not in ("fp8", "bf16"):
        return Conversion(compute=recipe.compute, matrices=list_matrices(model, recipe), gpu=device.gpu), {}
    found = find_fusable_blocks(model, recipe, device)
    lazy = bool(found.specs) or not one_graph
    of_experts, experts = survey_experts(model, recipe)
    layers = [*survey_layers(model, recipe, device, rows, found.specs, lazy), *of_experts]
    surveyed = {layer.path: LayerUse(_get_kind(layer), tuple(layer.choice), layer.reason) for layer in layers}
    surveyed |= {path: LayerUse("linear", ("fp32",) * 3, explain_router()) for path in find_routers(model)}
    return Conversion(
        layers,
        blocks=[path for path, _ in model.named_modules() if path in found.specs],
        unfused=found.reasons,
        compute=recipe.compute,
        matrices=list_matrices(model, recipe, surveyed),
        experts=experts,
        wide_experts=survey_wide_experts(model, recipe, experts) if device.kind == "cuda" and lazy else {},
        gpu=device.gpu,
    ), found.specs


def _get_kind(layer: Layer) -> str:
    return {"kept": "linear", "lazy head": "head"}.get(layer.part_of, layer.part_of)


def is_lean(recipe: Recipe) -> bool:
    """Whether weights are stored in BF16 only, so that FP8 copies in both layouts would double their memory."""
    return recipe.master != "fp32"


def _convert_linear(
    module: Any,
    layer: Layer,
    scales: TensorScales | None,
    recipe: Recipe,
    source: str,
    shared_input: linear.SharedInputCast,
    readers: int,
) -> None:
    """``source`` is the site of the input, which ``readers`` layers share through ``shared_input``."""
    assert scales is not None
    site, transposed_weight = scales.sites.get(f"{layer.path}.weight"), linear.has_transposed_weight(module)
    lean, path = is_lean(recipe), layer.path
    weight = WeightCastPlan.of(
        module.weight, site=site, scales=scales, transposed_weight=transposed_weight, lean=lean, path=path,
        stored_scale=get_stored_scale(module),
    )  # fmt: skip
    grad = scales.sites[f"{layer.path}.grad_output"]
    plan = linear.LinearPlan(weight, layer.choice, scales.sites[source], grad, scales, shared_input, readers)
    linear.convert_linear(module, plan)
