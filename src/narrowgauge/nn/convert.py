"""Conversion: finds what pays in a model, swaps how it is computed, and says what it did, layer by layer.

Nothing about the model's parameters changes, neither names nor shapes nor objects: a converted model saves and loads
the checkpoints of an unconverted one. What is found, in this order:

    blocks    modules with norm1, qkv, out, norm2, up (and gate), down and attend, as in the built-in GPT and Llama:
              computed as one function (blocks.py)
    head      a model that ends in ``finish(x, targets)`` with norm and lm_head: head and loss in one (head.py)
    trunk     a model whose ``trunk(x, targets, ...)`` runs such blocks and then ``finish``: a chain of them (blocks.py)
    linears   every other nn.Linear (or transformers' Conv1D): swapped one by one (linear.py); FP8 only
    embeddings  nn.Embedding: how its gradient is added up (embedding.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from narrowgauge.hardware import Device, detect
from narrowgauge.kernels.norm import MAX_COLUMNS
from narrowgauge.nn.changes import apply_change, find_change, is_replaced
from narrowgauge.nn.fused import blocks, embedding
from narrowgauge.nn.fused.casts import Projection
from narrowgauge.nn.fused.modules import FusedBlock, FusedHead, FusedTrunk
from narrowgauge.nn.matrix_inventory import Matrix, Use, account, kept_by
from narrowgauge.nn.matrix_inventory_text import summarize, tabulate
from narrowgauge.nn.products import linear
from narrowgauge.nn.products.choose_formats import Decision, decide
from narrowgauge.nn.products.gemm import ALL_BF16, ALL_FP8, E4M3, E5M2, GemmChoice
from narrowgauge.nn.products.weight_casts import WeightPlan
from narrowgauge.recipe import Recipe, parse
from narrowgauge.scaling.tensor import Site, TensorScales

TOGETHER = (
    {"q_proj", "k_proj", "v_proj"}, {"query", "key", "value"}, {"q_lin", "k_lin", "v_lin"}, {"to_q", "to_k", "to_v"},
    {"wq", "wk", "wv"}, {"q", "k", "v"}, {"gate_proj", "up_proj"}, {"w1", "w3"}, {"wi_0", "wi_1"},
)  # fmt: skip
"""Names of layers, beside each other in a model, that read one input, as attention and gated perceptrons are written.
Where they are given different ones all the same, each is cast, by a scale for the largest."""
ROWS = 16384
"""How many tokens a step is taken to have where nobody says: the choice changes little with it."""


@dataclass(frozen=True)
class Layer:
    """What became of one linear layer."""

    path: str
    shape: tuple[int, int]
    """Outputs and inputs."""
    part_of: str
    """block, head, linear, or kept (left as it was)."""
    choice: GemmChoice
    reason: str
    decision: Decision | None = None


@dataclass
class Conversion:
    """The report, and the FP8 scales that the engine moves after each update."""

    layers: list[Layer] = field(default_factory=list)
    scales: TensorScales | None = None
    blocks: list[str] = field(default_factory=list)
    slot: linear.Slot = field(default_factory=linear.Slot)
    """What layers that read one input hand to each other within a forward."""
    compute: str = "fp32"
    """What the recipe computes in."""
    matrices: list[Matrix] = field(default_factory=list)
    """Every parameter of two or more dimensions, and in which format it is multiplied (account.py)."""

    def summary(self) -> str:
        """One line: how much of the model is multiplied in the recipe's format, and in which the rest is."""
        fused = f", {len(self.blocks)} blocks fused" if self.blocks else ""
        head = f"{self.compute.upper()} in "
        if self.compute == "fp8":
            count = sum(layer.choice.count("fp8") for layer in self.layers)
            head += f"{count} of {3 * len(self.layers)} products of {len(self.layers)} layers{fused}: "
            fused = ""
        return head + summarize(self.matrices, self.compute, fused)

    def __str__(self) -> str:
        return tabulate(self.matrices)


def convert(
    model: nn.Module,
    recipe: str | Recipe = "fp8",
    device: Device | None = None,
    rows: int = ROWS,
    compile: bool = False,
) -> Conversion:
    """Swap what pays under the recipe; ``rows`` is how many tokens or samples a linear layer sees in a step.

    ``compile``: compile what blocks leave to the model, an attention with rotations, say.
    """
    device = device or detect(str(next(model.parameters()).device))
    recipe = parse(recipe, device)
    if recipe.compute not in ("fp8", "bf16"):
        return Conversion(compute=recipe.compute, matrices=account(model, recipe))
    plans = list(_survey(model, recipe, device, rows))
    leaders = _leaders(plans)
    sites = {name: dtype for layer in plans if "fp8" in layer.choice for name, dtype in _sites(layer, leaders)}
    scales = None
    if sites:
        scales = TensorScales(
            sites,
            next(model.parameters()).device,
            mode=recipe.scaling,
            history=recipe.history,
            margin=recipe.margin,
            amax=recipe.amax,
        )
    surveyed = {layer.path: Use(_kind(layer), tuple(layer.choice), layer.reason) for layer in plans}
    result = Conversion(plans, scales, compute=recipe.compute, matrices=account(model, recipe, surveyed))
    by_path = {layer.path: layer for layer in plans}
    for path, module in model.named_modules():
        if is_block(module) and by_path[f"{path}.qkv"].part_of == "block":
            _convert_block(module, path, by_path, scales, recipe, compile)
            result.blocks.append(path)
        elif path in by_path and by_path[path].part_of == "linear":
            leader = leaders.get(path, path)
            readers = max(1, sum(one == leader for one in leaders.values()))
            _convert_linear(module, by_path[path], scales, recipe, f"{leader}.input", result.slot, readers)
        elif embedding.fits(module):
            embedding.convert_embedding(module)
    if "lm_head" in by_path and by_path["lm_head"].part_of == "head":
        end, whole = by_path["lm_head"], cast(Any, model)
        site = scales.sites.get("lm_head.weight") if scales is not None else None
        weight = WeightPlan.of(whole.lm_head.weight, site=site, scales=scales, lean=is_lean(recipe), path="lm_head")
        kind = _norm_kind(whole.norm) or "layer"
        apply_change(model, FusedHead(weight, end.choice, kind))
        chained = hasattr(model, "trunk") and not is_replaced(model, "trunk")
        if chained and all(find_change(block, FusedBlock) for block in getattr(model, "blocks", ())):
            apply_change(model, FusedTrunk(weight, end.choice))
    return result


def _kind(layer: Layer) -> str:
    return "linear" if layer.part_of == "kept" else layer.part_of


def _leaders(layers: list[Layer]) -> dict[str, str]:
    """Of layers that are given the same input by their names: the first of them, whose site and cast serve all."""
    found: dict[str, str] = {}
    first: dict[tuple[str, int, int], str] = {}
    for layer in layers:
        parent, _, name = layer.path.rpartition(".")
        group = next((index for index, names in enumerate(TOGETHER) if name in names), None)
        if group is not None and layer.part_of == "linear" and "fp8" in (layer.choice.output, layer.choice.grad_weight):
            found[layer.path] = first.setdefault((parent, group, layer.shape[1]), layer.path)
    return found


def _sites(layer: Layer, leaders: dict[str, str]) -> Iterator[tuple[str, torch.dtype]]:
    """The tensors of a layer that are cast by delayed scales: the head looks at its input itself."""
    if layer.part_of in ("block", "linear"):
        if leaders.get(layer.path, layer.path) == layer.path:
            yield f"{layer.path}.input", E4M3
        yield f"{layer.path}.grad_output", E5M2
    yield f"{layer.path}.weight", E4M3


def is_lean(recipe: Recipe) -> bool:
    """Whether weights are in BF16 alone, so that FP8 copies in both layouts would be as much again."""
    return recipe.master != "fp32"


def is_block(module: nn.Module) -> bool:
    """Whether a module has the parts of a transformer block, without biases, as blocks.py computes it."""
    if not all(hasattr(module, name) for name in ("norm1", "qkv", "out", "norm2", "up", "down", "attend", "heads")):
        return False
    linears = [getattr(module, name) for name in block_linears(module)]
    norms = [module.norm1, module.norm2]
    if any(is_replaced(part, "forward") for part in (module, *norms)):
        return False
    return all(type(m) is nn.Linear and linear.is_linear(m) and m.bias is None for m in linears) and all(
        getattr(m, "bias", None) is None and _norm_fits(m) for m in norms
    )


def block_linears(module: nn.Module) -> list[str]:
    return ["qkv", "out", *(["gate"] if hasattr(module, "gate") else []), "up", "down"]


def _norm_kind(module: Any) -> str | None:
    return {"LayerNorm": "layer", "RMSNorm": "rms"}.get(type(module).__name__)


def _norm_fits(module: Any) -> bool:
    """Whether our own norm can take a module's place: it holds a row in registers, up to some width."""
    return _norm_kind(module) is not None and len(module.weight) <= MAX_COLUMNS


def _survey(model: nn.Module, recipe: Recipe, device: Device, rows: int) -> Iterator[Layer]:
    """What is to become of each linear layer."""
    in_block = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if is_block(module) and not _has_keepers(path, module, recipe, model)
        for name in block_linears(module)
    }
    has_head = all(hasattr(model, name) for name in ("finish", "norm", "lm_head")) and _norm_fits(model.norm)
    has_head = has_head and not is_replaced(model, "finish") and not is_replaced(model.norm, "forward")
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if not linear.is_linear(module):
            continue
        shape = linear.shape_of(module)
        part = "block" if path in in_block else "head" if has_head and path == "lm_head" else "linear"
        kept = kept_by(modules, path, recipe)
        misfit = linear.fits(module) if recipe.compute == "fp8" else None
        if kept:
            yield Layer(path, shape, "kept", ALL_BF16, kept)
        elif recipe.compute == "bf16" or misfit:
            part = "kept" if part == "linear" else part
            yield Layer(path, shape, part, ALL_BF16, misfit or "BF16, by the recipe")
        else:
            decision = Decision(ALL_FP8, "FP8 in every product, by the recipe")
            if recipe.products == "fastest":
                decision = decide(rows, shape[1], shape[0], device, part != "linear")
            part = "kept" if part == "linear" and decision.choice == ALL_BF16 else part
            yield Layer(path, shape, part, decision.choice, decision.reason, decision)


def _has_keepers(path: str, block: nn.Module, recipe: Recipe, model: nn.Module) -> bool:
    """Whether a part of the block is kept in FP32, so that the block cannot be computed as one."""
    modules = dict(model.named_modules())
    return any(
        kept_by(modules, f"{path}.{name}" if path else name, recipe) for name, _ in block.named_modules() if name
    )


def _convert_linear(
    module: Any,
    layer: Layer,
    scales: TensorScales | None,
    recipe: Recipe,
    source: str,
    slot: linear.Slot,
    readers: int,
) -> None:
    """``source``: the site of the input, which ``readers`` layers have in common, and its cast by ``slot``."""
    assert scales is not None
    site, turned = scales.sites.get(f"{layer.path}.weight"), linear.is_turned(module)
    lean, path = is_lean(recipe), layer.path
    weight = WeightPlan.of(module.weight, site=site, scales=scales, turned=turned, lean=lean, path=path)
    grad = scales.sites[f"{layer.path}.grad_output"]
    plan = linear.LinearPlan(weight, layer.choice, scales.sites[source], grad, scales, slot, readers)
    linear.convert_linear(module, plan)


def _convert_block(
    module: nn.Module,
    path: str,
    layers: dict[str, Layer],
    scales: TensorScales | None,
    recipe: Recipe,
    compile: bool,
) -> None:
    block: Any = module

    def site(layer: Layer, end: str) -> Site | None:
        return scales.sites.get(f"{layer.path}.{end}") if scales is not None else None

    def projection(*names: str) -> Projection:
        # A gate and its twin are one product: the first one's sites and choice serve both.
        layer = layers[f"{path}.{names[0]}"]
        parameters = (getattr(module, name).weight for name in names)
        own, lean = site(layer, "weight"), is_lean(recipe)
        weight = WeightPlan.of(*parameters, site=own, scales=scales, lean=lean, path=layer.path)
        return Projection(weight, layer.choice, site(layer, "input"), site(layer, "grad_output"))

    gated = hasattr(module, "gate")
    plan = blocks.BlockPlan(
        kind=_norm_kind(block.norm1) or "layer",
        eps=(block.norm1.eps, block.norm2.eps),
        activation="swiglu" if gated else "gelu",
        heads=block.heads,
        packed=not gated,
        qkv=projection("qkv"),
        out=projection("out"),
        up=projection("gate", "up") if gated else projection("up"),
        down=projection("down"),
        scales=scales,
        checkpoint=recipe.checkpoint,
        path=path,
    )
    apply_change(module, FusedBlock(plan, compile and gated))
