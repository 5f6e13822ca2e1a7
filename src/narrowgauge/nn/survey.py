"""Decides for each linear layer of a model in which formats its products run, and lists the tensors with FP8 scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from narrowgauge.errors import UsageError
from narrowgauge.hardware import Device
from narrowgauge.kernels.fp8_formats import FP8_DTYPES
from narrowgauge.kernels.norm import MAX_COLUMNS
from narrowgauge.nn.blocks.projections import find_projection
from narrowgauge.nn.blocks.spec import BlockSpec
from narrowgauge.nn.experts.routers import explain_router, find_routers
from narrowgauge.nn.find_heads import find_heads
from narrowgauge.nn.matrix_inventory import explain_kept_fp32
from narrowgauge.nn.module_changes import has_own_method
from narrowgauge.nn.products import linear
from narrowgauge.nn.products.choose_formats import Decision, decide
from narrowgauge.nn.products.gemm import ALL_BF16, ALL_FP8, E4M3, GemmChoice
from narrowgauge.nn.products.stored_fp8 import can_store, is_large_embedding
from narrowgauge.nn.wide_forwards import find_keys, find_wide_forwards
from narrowgauge.recipe import Recipe

SAME_INPUT_NAMES = (
    {"q_proj", "k_proj", "v_proj"}, {"query", "key", "value"}, {"q_lin", "k_lin", "v_lin"}, {"to_q", "to_k", "to_v"},
    {"wq", "wk", "wv"}, {"q", "k", "v"}, {"c_q", "c_k", "c_v"}, {"gate_proj", "up_proj"}, {"w1", "w3"},
    {"wi_0", "wi_1"},
)  # fmt: skip
"""Names of sibling layers that usually read one input, as in attention and gated MLPs. If they get different inputs,
each input is cast, with one scale that fits the largest."""


@dataclass(frozen=True)
class Layer:
    """The result of conversion for one linear layer."""

    path: str
    shape: tuple[int, int]
    """Outputs and inputs."""
    part_of: str
    """block, head, linear, experts (a stack of matrices), or kept (not converted)."""
    choice: GemmChoice
    reason: str
    decision: Decision | None = None


def survey_layers(
    model: nn.Module, recipe: Recipe, device: Device, rows: int, specs: dict[str, BlockSpec], lazy: bool
) -> Iterator[Layer]:
    """Yield the decision for each linear layer. Layers of a block that read one input are one product.

    ``lazy``: heads compute the loss without logits.
    """
    stacked = {
        f"{path}.{name}": [f"{path}.{member}" for member in group]
        for path, spec in specs.items()
        for group in spec.products
        for name in group
    }
    adapters = {
        f"{path}.{name}" for path, spec in specs.items() for adapter in spec.adapters for name in (adapter.a, adapter.b)
    }
    has_head = all(hasattr(model, name) for name in ("finish", "norm", "lm_head")) and _norm_fits(model.norm)
    has_head = has_head and not has_own_method(model, "finish") and not has_own_method(model.norm, "forward")
    modules = dict(model.named_modules())
    heads = find_heads(model, by_width=lazy or recipe.head != "fp8")
    layers = [path for path, module in modules.items() if linear.is_linear(module)]
    layers += [name for name in stacked if name not in layers]  # the last are nn.MultiheadAttention's
    keys = find_keys(specs, layers)
    if recipe.attention_keys != "fp8" and not keys:
        raise UsageError(
            f"recipe: attention_keys={recipe.attention_keys} found no layer in {type(model).__name__} that computes "
            "attention's keys"
        )
    wide = find_wide_forwards(model, recipe, layers, stacked, keys)
    routers = find_routers(model)
    has_format = recipe.head == "fp8"  # whether the field has an effect, if it says more than the default
    for path in layers:
        source = find_projection(model, path)
        shape = source.shape
        in_block = path in stacked or path in adapters
        part = "block" if in_block else "head" if has_head and path == "lm_head" else "linear"
        part = "lazy head" if part == "linear" and path in heads and lazy else part
        members = [find_projection(model, name).shape for name in stacked.get(path, [path])]
        kept = explain_kept_fp32(modules, source.path, recipe) or (explain_router() if path in routers else None)
        misfit = next(filter(None, map(linear.explain_misfit, members)), None) if recipe.compute == "fp8" else None
        if part == "head" or path in heads:
            has_format = True
        if kept:
            yield Layer(path, shape, "kept", ALL_BF16, kept)
        elif path in adapters:
            yield Layer(path, shape, part, ALL_BF16, "low-rank adapters compute in BF16")
        elif adapted := _find_adapted_parameter(modules, path):
            reason = f"its weight is read by the adapter of {adapted}; the layer itself is not called"
            yield Layer(path, shape, "kept", ALL_BF16, reason)
        elif recipe.compute == "bf16" or misfit:
            part = "kept" if part == "linear" else part
            yield Layer(path, shape, part, ALL_BF16, misfit or "the recipe computes in BF16")
        else:
            decision = Decision(ALL_FP8, "the recipe sets FP8 for all products")
            if recipe.products == "fastest":
                outputs = sum(member[0] for member in members)
                granularity = recipe.granularity if part == "linear" else "tensor"
                decision = decide(rows, shape[1], outputs, device, part != "linear", granularity)
            if path in wide and decision.choice.output == "fp8":
                decision = _widen(decision, part != "linear", wide[path], "output")
            if part == "head" or path in heads:
                decision = _apply_head_format(decision, recipe.head, part != "linear")
            part = "kept" if part == "linear" and decision.choice == ALL_BF16 else part
            yield Layer(path, shape, part, decision.choice, decision.reason, decision)
    if not has_format:
        raise UsageError(f"recipe: head={recipe.head} found no layer in {type(model).__name__} that computes logits")


def _find_adapted_parameter(modules: Mapping[str, nn.Module], path: str) -> str | None:
    """Return the parameter to which PEFT adds the product of a layer's weight with another one, such as experts."""
    owner, _, name = path.rpartition(".")  # wrapper.lora_A.default
    wrapper = modules.get(owner.rpartition(".")[0])
    adapted = getattr(wrapper, "parameter_name", None)
    is_adapter = isinstance(getattr(wrapper, "lora_A", None), nn.ModuleDict) and owner.endswith(("lora_A", "lora_B"))
    return adapted if name and is_adapter and isinstance(adapted, str) else None


def _apply_head_format(decision: Decision, head: str, fused: bool) -> Decision:
    """Return the decision for a layer that computes logits, as the recipe's field says.

    Gradients of logits are in FP8 only where the loss computes them: there they are right on average.
    """
    if head == "bf16":
        return Decision(ALL_BF16, "the recipe sets BF16 for the head")
    if fused or "fp8" not in (decision.choice.grad_input, decision.choice.grad_weight):
        return decision
    return _widen(decision, fused, "gradients of logits are in BF16 outside of the loss", "grad_input", "grad_weight")


def _widen(decision: Decision, fused: bool, reason: str, *products: str) -> Decision:
    """Return a decision with these products in BF16."""
    choice = decision.choice._replace(**dict.fromkeys(products, "bf16"))
    chosen_ms = decision.chosen_ms if decision.costs is None else decision.costs.of(choice, fused)
    return replace(decision, choice=choice, reason=reason, chosen_ms=chosen_ms)


def get_norm_kind(module: Any) -> str | None:
    return {"LayerNorm": "layer", "RMSNorm": "rms"}.get(type(module).__name__)


def _norm_fits(module: Any) -> bool:
    """Whether our norm kernel supports a module: it keeps a row in registers, up to a maximum width."""
    return get_norm_kind(module) is not None and len(module.weight) <= MAX_COLUMNS


def find_input_leaders(layers: list[Layer]) -> dict[str, str]:
    """Map layers that share an input, by their names, to the first of them, whose site and cast serve all."""
    found: dict[str, str] = {}
    first: dict[tuple[str, int, int], str] = {}
    for layer in layers:
        parent, _, name = layer.path.rpartition(".")
        group = next((index for index, names in enumerate(SAME_INPUT_NAMES) if name in names), None)
        if group is not None and layer.part_of == "linear" and "fp8" in (layer.choice.output, layer.choice.grad_weight):
            found[layer.path] = first.setdefault((parent, group, layer.shape[1]), layer.path)
    return found


def list_sites(layer: Layer, leaders: dict[str, str], recipe: Recipe) -> Iterator[tuple[str, torch.dtype]]:
    """Yield the tensors of a layer that have scales; the head computes the scale of its input itself."""
    if layer.part_of in ("block", "linear", "experts"):
        if leaders.get(layer.path, layer.path) == layer.path:
            yield f"{layer.path}.input", E4M3
        yield f"{layer.path}.grad_output", FP8_DTYPES[recipe.first_gradients_format]
    yield f"{layer.path}.weight", E4M3


def get_granularity(layer: Layer, recipe: Recipe) -> str:
    """Return what has a scale in a layer's tensors: blocks and heads have one for each tensor."""
    return recipe.granularity if layer.part_of == "linear" else "tensor"


def list_backward_sites(layer: Layer) -> Iterator[str]:
    yield f"{layer.path}.grad_output"
    if layer.choice.output != "fp8":  # then grad_input is the first to cast the weight
        yield f"{layer.path}.weight"


def list_stored_groups(
    model: nn.Module, recipe: Recipe, layers: Iterable[Layer], specs: Mapping[str, BlockSpec]
) -> list[list[str]]:
    """Return the paths of frozen layers whose weights are stored in FP8; layers whose products are one, together.

    These are the layers whose weights only FP8 products read, and large embeddings. For an embedding that is tied to
    the head, the head stands in the list.
    """
    if recipe.frozen != "fp8":
        return []
    found = {layer.path: layer for layer in layers if layer.choice[:2] == ("fp8", "fp8")}
    groups = [[f"{path}.{name}" for name in group] for path, spec in specs.items() for group in spec.products]
    groups += [[path] for path, layer in found.items() if layer.part_of in ("linear", "lazy head")]
    modules = dict(model.named_modules())
    users: dict[int, list[str]] = {}
    for path, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(path)

    def fits(path: str) -> bool:
        module = modules.get(path)
        if module is None or not can_store(module) or explain_kept_fp32(modules, path, recipe):
            return False
        tied = [other for other in users[id(module._parameters["weight"])] if other != path]
        return all(is_large_embedding(modules[other]) and can_store(modules[other]) for other in tied)

    chosen = [group for group in groups if all(path in found and fits(path) for path in group)]
    tables = [path for path, module in modules.items() if is_large_embedding(module) and fits(path)]
    known = {id(modules[path]._parameters["weight"]) for group in chosen for path in group}
    for path in tables:
        if id(modules[path]._parameters["weight"]) not in known:
            known.add(id(modules[path]._parameters["weight"]))
            chosen.append([path])
    return chosen
