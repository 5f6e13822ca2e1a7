"""The inventory of a model's matrices: for each parameter of two or more dimensions its kind and its product formats.

Every such parameter is listed once, even if modules share it. If one module multiplies it and another looks it up, as
with a tied head and embedding, the product counts. For modules of known classes the formats are known. For others only
the parameters are visible, and that autocast casts the products it supports: these entries are marked as assumed.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from narrowgauge.nn.keep_fp32 import KeptInFp32
from narrowgauge.nn.module_changes import find_change, original_class
from narrowgauge.nn.products.linear import explain_not_converted, has_own_forward, has_transposed_weight
from narrowgauge.recipe import Recipe

AUTOCAST = {"fp32": "fp32", "tf32": "tf32", "fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}
"""The format of products left to autocast, by the recipe's compute format."""
CHOSEN_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "top_k",
)  # fmt: skip
"""Attribute names, in models and configurations, of the number of experts per token."""
EXPERTS = re.compile(r"experts?|moe", re.IGNORECASE)
KIND_PRIORITY = (
    "linear",
    "block",
    "head",
    "experts",
    "attention",
    "recurrent",
    "convolution",
    "bilinear",
    "computed",
    "raw",
)
"""If modules share a parameter, the first of these kinds counts; any product counts before a lookup."""

Modules = Mapping[str, nn.Module]
"""A model's modules by path, the model itself included."""


@dataclass(frozen=True)
class LayerUse:
    """How a layer computes after conversion."""

    kind: str
    formats: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Matrix:
    """One parameter of two or more dimensions."""

    name: str
    """Name of the parameter, as in the state dictionary."""
    shape: tuple[int, ...]
    kind: str
    """Multiplied: linear, block or head (a linear layer in a fused block or head), experts, attention, recurrent,
    convolution, bilinear, computed (a weight is computed from it), raw (of a module with its own forward). Not
    multiplied: embedding, norm, bias, uninitialized."""
    formats: tuple[str, ...]
    """Formats of output, grad_input and grad_weight; empty if it is not multiplied."""
    reason: str
    size: int
    active: float | None = None
    """The share of it that one token is multiplied by: 1 for a linear layer; None if unknown, or if it depends on the
    input, as for convolutions."""
    assumed: bool = False
    """The formats assume products that autocast supports; the module's own code may use others."""

    @property
    def path(self) -> str:
        """The module's path if the parameter is its only matrix by definition; else the parameter's name."""
        owner, _, last = self.name.rpartition(".")
        single = self.kind in ("linear", "block", "head", "convolution", "embedding", "bilinear", "norm")
        return owner if single and last == "weight" and owner else self.name


def list_matrices(model: nn.Module, recipe: Recipe, surveyed: Mapping[str, LayerUse] | None = None) -> list[Matrix]:
    """Return every matrix of the model, in the model's order; ``surveyed`` has the converted linear layers by path."""
    found: dict[int, Matrix] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is None or not _is_matrix(parameter):
                continue
            matrix = _describe(modules, path, module, name, parameter, recipe, surveyed or {})
            other = found.get(id(parameter))
            found[id(parameter)] = matrix if other is None else _merge_shared(other, matrix)
    return list(found.values())


def _is_matrix(parameter: Tensor) -> bool:
    return is_lazy(parameter) or parameter.dim() > 1


def _merge_shared(first: Matrix, second: Matrix) -> Matrix:
    """Return the use that counts, and name the other in its reason."""
    ranks = {kind: place for place, kind in enumerate(KIND_PRIORITY)}
    one, other = sorted((first, second), key=lambda matrix: ranks.get(matrix.kind, len(KIND_PRIORITY)))
    return replace(one, reason=f"{one.reason}; shared with {other.path}")


def _describe(
    modules: Modules,
    path: str,
    module: nn.Module,
    name: str,
    parameter: Tensor,
    recipe: Recipe,
    surveyed: Mapping[str, LayerUse],
) -> Matrix:
    full = f"{path}.{name}" if path else name
    if is_lazy(parameter):
        return Matrix(full, (), "uninitialized", (), "not initialized before the first forward", 0)
    shape, size = tuple(parameter.shape), parameter.numel()
    unused = _describe_unmultiplied(module, name)
    if unused is not None:
        return Matrix(full, shape, *unused, size)
    kept = explain_kept_fp32(modules, path, recipe)
    use = surveyed.get(path if name == "weight" else f"{path}.{name.removesuffix('_weight')}")
    if use is not None:
        formats = ("fp32",) * 3 if kept else use.formats
        return Matrix(
            full, shape, use.kind, formats, use.reason, size, _get_active_share(modules, path, use.kind, shape)
        )
    kind, formats, reason, assumed = _describe_by_class(modules, path, module, name, shape, recipe)
    if parameter.is_complex() or not parameter.is_floating_point():
        formats, reason = (str(parameter.dtype).removeprefix("torch."),) * 3, f"{reason}; its dtype is not changed"
    elif kept:
        formats, reason, assumed = ("fp32",) * 3, kept, False
    active = None if kind in ("convolution", "raw") else _get_active_share(modules, path, kind, shape)
    return Matrix(full, shape, kind, formats, reason, size, active, assumed)


def _describe_unmultiplied(module: nn.Module, name: str) -> tuple[str, tuple[str, ...], str] | None:
    """Return kind, formats and reason of a parameter that no product reads, else None."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding", (), "looked up, not multiplied"
    if isinstance(module, nn.LayerNorm | nn.GroupNorm) or original_class(module).__name__.endswith("Norm"):
        return "norm", (), "scales its input elementwise"
    if name == "bias" or name.endswith("_bias") or name.startswith("bias_"):
        return "bias", (), "added, not multiplied"
    return None


def _describe_by_class(
    modules: Modules, path: str, module: nn.Module, name: str, shape: tuple[int, ...], recipe: Recipe
) -> tuple[str, tuple[str, ...], str, bool]:
    """Return kind, formats, reason and whether they are assumed, for a parameter that was not surveyed."""
    narrow = (AUTOCAST[recipe.compute],) * 3
    words = recipe.compute.upper() if recipe.compute != "fp8" else "BF16"
    cls = original_class(module)
    made = _find_computed_layer(path, module, name)
    if made is not None:
        owner = modules[made]
        where = made or cls.__name__
        formats = ("fp32",) * 3 if isinstance(owner, nn.Bilinear) else narrow
        return "computed", formats, f"the weight of {where} is computed from it; not converted", False
    if isinstance(module, nn.MultiheadAttention):
        return "attention", narrow, "nn.MultiheadAttention multiplies it itself; not converted", False
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent", narrow, f"nn.{_get_torch_name(module)} multiplies it itself; not converted", False
    if isinstance(module, _ConvNd):
        return "convolution", narrow, f"convolutions run in {words}", False
    if isinstance(module, nn.Bilinear):
        return "bilinear", ("fp32",) * 3, "nn.Bilinear computes in FP32", False
    if isinstance(module, nn.Linear) or has_transposed_weight(module):
        kind = "attention" if isinstance(module, NonDynamicallyQuantizableLinear) else "linear"
        left = "fused=False leaves it to autocast" if recipe.compute == "fp8" else f"the recipe computes in {words}"
        return kind, narrow, explain_not_converted(module) or left, has_own_forward(module)
    if _is_stack_of_experts(path, module, shape):
        return "experts", narrow, f"expert products run in {words}", False
    return "raw", narrow, f"used by {cls.__name__}'s own forward; not converted", recipe.compute not in ("fp32", "tf32")


def _get_torch_name(module: nn.Module) -> str:
    """Return the name of the torch class that a module is an instance of."""
    return next(cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch."))


def _find_computed_layer(path: str, module: nn.Module, name: str) -> str | None:
    """Return the path of the layer whose weight is computed from a parameter, or None."""
    head, separator, _ = path.rpartition(".parametrizations.")
    if separator or path.startswith("parametrizations."):
        return head
    if isinstance(module, ParametrizationList):
        return path.rpartition(".")[0]
    base = name.removesuffix("_g").removesuffix("_v").removesuffix("_orig")
    if base != name and base not in module._parameters and isinstance(getattr(module, base, None), Tensor):
        return path
    return None


def explain_kept_fp32(modules: Modules, path: str, recipe: Recipe) -> str | None:
    """Return why a module is kept in FP32: a pattern of the recipe, or a change on it or on a parent. Else None."""
    for owner in _list_owners(path):
        module = modules[owner]
        name = original_class(module).__name__
        for pattern in recipe.keep:
            if owner and (fnmatch.fnmatchcase(owner, pattern) or fnmatch.fnmatchcase(name, pattern)):
                return f"kept in FP32 by keep={pattern}"
        change = find_change(module, KeptInFp32)
        if change is not None:
            return f"kept in FP32: {change.reason}"
    return None


def _list_owners(path: str) -> Iterator[str]:
    """Yield the paths of a module's parents, from the model to the module itself."""
    yield ""
    parts = path.split(".") if path else []
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def _get_active_share(modules: Modules, path: str, kind: str, shape: tuple[int, ...]) -> float | None:
    """Return the share of experts per token; 1 for layers that every token passes; None if unknown."""
    places = list(_list_owners(path))
    owners = [modules[place] for place in places]
    lists = [m for place, m in zip(places, owners, strict=True) if isinstance(m, nn.ModuleList) and is_experts(place)]
    if lists:
        count: int | None = len(lists[-1])
    elif kind == "experts":
        count = shape[0] if len(shape) == 3 else _count_experts(modules[path])
    else:
        return 1.0
    for owner in reversed(owners):
        for holder in (owner, getattr(owner, "config", None)):
            chosen = next((getattr(holder, name) for name in CHOSEN_PER_TOKEN if hasattr(holder, name)), None)
            if isinstance(chosen, int) and chosen > 0:
                return min(1.0, chosen / count) if count else None
    return None


def is_experts(path: str) -> bool:
    """Whether a list of modules contains experts, by its name."""
    return path.rpartition(".")[2] in ("experts", "expert")


def _is_stack_of_experts(path: str, module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Decide by the names of the module and its class. With two dimensions, only the class excludes a router."""
    name = original_class(module).__name__
    if len(shape) == 3:
        return EXPERTS.search(f"{path}.{name}") is not None
    return "Expert" in name and "Router" not in name and _count_experts(module) is not None


def _count_experts(module: Any) -> int | None:
    """Return a module's number of experts, from its attributes."""
    names = ("num_experts", "n_experts", "num_local_experts", "moe_num_experts")
    return next((getattr(module, name) for name in names if isinstance(getattr(module, name, None), int)), None)
