"""The account of a model's matrices: what each parameter of two or more dimensions is, and in which format it is
multiplied.

Every such parameter is named once, also where modules share it; where one of them multiplies it and another looks it
up, as a head does with an embedding, the product counts. What a module of a known class does is known. Of others only
the parameters can be seen, and that torch's autocast casts for products it knows: these are marked as assumed.
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

from narrowgauge.nn.changes import find_change, original_class
from narrowgauge.nn.keep_fp32 import KeptInFp32
from narrowgauge.nn.products.linear import has_own_forward, is_turned, why_left
from narrowgauge.recipe import Recipe

AUTOCAST = {"fp32": "fp32", "tf32": "tf32", "fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}
"""What products run in that conversion leaves to autocast, by what the recipe computes in."""
CHOSEN_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "top_k",
)  # fmt: skip
"""What models and their configurations call the number of experts that a token is sent to."""
EXPERTS = re.compile(r"experts?|moe", re.IGNORECASE)
RANKS = ("linear", "block", "head", "experts", "attention", "recurrent", "convolution", "bilinear", "computed", "raw")
"""Of several modules with one parameter, the use that counts: the first of these; any product before a lookup."""

Modules = Mapping[str, nn.Module]
"""A model's modules by path, the model itself included."""


@dataclass(frozen=True)
class Use:
    """How a layer that conversion has surveyed is computed."""

    kind: str
    formats: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Matrix:
    """One parameter of two or more dimensions."""

    name: str
    """Of the parameter, as in the state dictionary."""
    shape: tuple[int, ...]
    kind: str
    """linear, block or head (a linear layer within a fused block or head), experts, attention, recurrent, convolution,
    bilinear, computed (a weight is made of it), raw (of a module with its own forward); embedding, norm, bias,
    uninitialized: not multiplied."""
    formats: tuple[str, ...]
    """Of the output, the gradient of the input and that of the weight; empty: it is not multiplied."""
    reason: str
    size: int
    active: float | None = None
    """The share of it that one token is multiplied by: 1 for a linear layer; None where the input decides, as for
    convolutions, or nobody knows."""
    assumed: bool = False
    """The formats are those of products that autocast knows; the module's own code may do otherwise."""

    @property
    def path(self) -> str:
        """The module, where the parameter is its only matrix by definition; else the parameter."""
        owner, _, last = self.name.rpartition(".")
        single = self.kind in ("linear", "block", "head", "convolution", "embedding", "bilinear", "norm")
        return owner if single and last == "weight" and owner else self.name


def account(model: nn.Module, recipe: Recipe, surveyed: Mapping[str, Use] | None = None) -> list[Matrix]:
    """Every matrix of the model, in the model's order; ``surveyed`` is what became of linear layers, by path."""
    found: dict[int, Matrix] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is None or not _is_matrix(parameter):
                continue
            matrix = _describe(modules, path, module, name, parameter, recipe, surveyed or {})
            other = found.get(id(parameter))
            found[id(parameter)] = matrix if other is None else _shared(other, matrix)
    return list(found.values())


def _is_matrix(parameter: Tensor) -> bool:
    return is_lazy(parameter) or parameter.dim() > 1


def _shared(first: Matrix, second: Matrix) -> Matrix:
    """The use that counts, naming the other."""
    ranks = {kind: place for place, kind in enumerate(RANKS)}
    one, other = sorted((first, second), key=lambda matrix: ranks.get(matrix.kind, len(RANKS)))
    return replace(one, reason=f"{one.reason}; shared with {other.path}")


def _describe(
    modules: Modules,
    path: str,
    module: nn.Module,
    name: str,
    parameter: Tensor,
    recipe: Recipe,
    surveyed: Mapping[str, Use],
) -> Matrix:
    full = f"{path}.{name}" if path else name
    if is_lazy(parameter):
        return Matrix(full, (), "uninitialized", (), "has no shape before the first forward", 0)
    shape, size = tuple(parameter.shape), parameter.numel()
    unused = _not_multiplied(module, name)
    if unused is not None:
        return Matrix(full, shape, *unused, size)
    kept = kept_by(modules, path, recipe)
    use = surveyed.get(path) if name == "weight" else None
    if use is not None:
        formats = ("fp32",) * 3 if kept else use.formats
        return Matrix(full, shape, use.kind, formats, use.reason, size, _active(modules, path, use.kind, shape))
    kind, formats, reason, assumed = _by_class(modules, path, module, name, shape, recipe)
    if parameter.is_complex() or not parameter.is_floating_point():
        formats, reason = (str(parameter.dtype).removeprefix("torch."),) * 3, f"{reason}; its format is left alone"
    elif kept:
        formats, reason, assumed = ("fp32",) * 3, kept, False
    active = None if kind in ("convolution", "raw") else _active(modules, path, kind, shape)
    return Matrix(full, shape, kind, formats, reason, size, active, assumed)


def _not_multiplied(module: nn.Module, name: str) -> tuple[str, tuple[str, ...], str] | None:
    """Kind, formats and reason of what takes part in no product."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding", (), "looked up, not multiplied"
    if isinstance(module, nn.LayerNorm | nn.GroupNorm) or original_class(module).__name__.endswith("Norm"):
        return "norm", (), "scales its input number by number"
    if name == "bias" or name.endswith("_bias") or name.startswith("bias_"):
        return "bias", (), "added, not multiplied"
    return None


def _by_class(
    modules: Modules, path: str, module: nn.Module, name: str, shape: tuple[int, ...], recipe: Recipe
) -> tuple[str, tuple[str, ...], str, bool]:
    """Kind, formats, reason and whether they are assumed, of what no survey has seen."""
    narrow = (AUTOCAST[recipe.compute],) * 3
    words = recipe.compute.upper() if recipe.compute != "fp8" else "BF16"
    cls = original_class(module)
    made = _computed_for(path, module, name)
    if made is not None:
        owner = modules[made]
        where = made or cls.__name__
        formats = ("fp32",) * 3 if isinstance(owner, nn.Bilinear) else narrow
        return "computed", formats, f"the weight of {where} is computed from it; not converted", False
    if isinstance(module, nn.MultiheadAttention):
        return "attention", narrow, "nn.MultiheadAttention multiplies it itself; not converted", False
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent", narrow, f"nn.{_torch_name(module)} multiplies it itself; not converted", False
    if isinstance(module, _ConvNd):
        return "convolution", narrow, f"convolutions run in {words}", False
    if isinstance(module, nn.Bilinear):
        return "bilinear", ("fp32",) * 3, "nn.Bilinear computes in FP32", False
    if isinstance(module, nn.Linear) or is_turned(module):
        kind = "attention" if isinstance(module, NonDynamicallyQuantizableLinear) else "linear"
        return kind, narrow, why_left(module) or f"{words}, by the recipe", has_own_forward(module)
    if _is_stack_of_experts(path, module, shape):
        return "experts", narrow, f"expert products run in {words}", False
    return "raw", narrow, f"used by {cls.__name__}'s own forward; not converted", recipe.compute not in ("fp32", "tf32")


def _torch_name(module: nn.Module) -> str:
    """The class of torch that a module is of."""
    return next(cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch."))


def _computed_for(path: str, module: nn.Module, name: str) -> str | None:
    """The path of the layer whose weight is computed from a parameter; None where it is a weight itself."""
    head, separator, _ = path.rpartition(".parametrizations.")
    if separator or path.startswith("parametrizations."):
        return head
    if isinstance(module, ParametrizationList):
        return path.rpartition(".")[0]
    base = name.removesuffix("_g").removesuffix("_v").removesuffix("_orig")
    if base != name and base not in module._parameters and isinstance(getattr(module, base, None), Tensor):
        return path
    return None


def kept_by(modules: Modules, path: str, recipe: Recipe) -> str | None:
    """Why a module is kept in FP32: by the recipe's patterns, or by a keeper on it or on what it is part of."""
    for owner in _owners(path):
        module = modules[owner]
        name = original_class(module).__name__
        for pattern in recipe.keep:
            if owner and (fnmatch.fnmatchcase(owner, pattern) or fnmatch.fnmatchcase(name, pattern)):
                return f"kept in FP32 by keep={pattern}"
        if find_change(module, KeptInFp32) is not None:
            return f"kept in FP32: {name} has no 16-bit products here"
    return None


def _owners(path: str) -> Iterator[str]:
    """The modules that a module is part of, from the model to itself, by path."""
    yield ""
    parts = path.split(".") if path else []
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def _active(modules: Modules, path: str, kind: str, shape: tuple[int, ...]) -> float | None:
    """Of experts, those that a token is sent to; 1 for what every token meets; None where that is not to be found."""
    places = list(_owners(path))
    owners = [modules[place] for place in places]
    lists = [m for place, m in zip(places, owners, strict=True) if isinstance(m, nn.ModuleList) and _is_experts(place)]
    if lists:
        count: int | None = len(lists[-1])
    elif kind == "experts":
        count = shape[0] if len(shape) == 3 else _count(modules[path])
    else:
        return 1.0
    for owner in reversed(owners):
        for holder in (owner, getattr(owner, "config", None)):
            chosen = next((getattr(holder, name) for name in CHOSEN_PER_TOKEN if hasattr(holder, name)), None)
            if isinstance(chosen, int) and chosen > 0:
                return min(1.0, chosen / count) if count else None
    return None


def _is_experts(path: str) -> bool:
    """Whether a list of modules is one of experts, by its name."""
    return path.rpartition(".")[2] in ("experts", "expert")


def _is_stack_of_experts(path: str, module: nn.Module, shape: tuple[int, ...]) -> bool:
    """By the names of the module and its class. Stacks of two dimensions are told from routers by the class alone."""
    name = original_class(module).__name__
    if len(shape) == 3:
        return EXPERTS.search(f"{path}.{name}") is not None
    return "Expert" in name and "Router" not in name and _count(module) is not None


def _count(module: Any) -> int | None:
    """How many experts a module says it has."""
    names = ("num_experts", "n_experts", "num_local_experts", "moe_num_experts")
    return next((getattr(module, name) for name in names if isinstance(getattr(module, name, None), int)), None)
