"""Lints what is to be trained: modules, parameters, optimizer and recipe. Nothing is computed.

A model on the meta device will do: only names, shapes and formats are looked at.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Adam, Optimizer

from narrowgauge.findings import NOTE, WARNING, Finding
from narrowgauge.lint.making import SMALLEST_FP16
from narrowgauge.lint.padding import UNALIGNED, multiple_for, padded, saved
from narrowgauge.lint.rules import RULES
from narrowgauge.nn.products.linear import is_linear, shape_of
from narrowgauge.optim import AdamW
from narrowgauge.optim.masters import has_master
from narrowgauge.recipe import Recipe

HALVES = {torch.float16: "FP16", torch.bfloat16: "BF16"}
LEAST = 64
"""Dimensions below this are a fraction of a tile: what they cost is not worth a word."""
WORTH = 0.005
"""Share of the time in products from which on padding is worth a warning."""


@dataclass
class Misfit:
    """Layers of one kind with a dimension that is off the multiple."""

    paths: list[str] = field(default_factory=list)
    weights: int = 0


def check(model: nn.Module, optimizer: Optimizer | None, recipe: Recipe) -> list[Finding]:
    """The findings of a model, the optimizer that steps it, and the recipe that trains it."""
    return [
        *_recipe(recipe),
        *_keepers(model, recipe),
        *_parameters(model),
        *_dimensions(model, recipe),
        *_ties(model, recipe),
        *(_optimizer(optimizer, recipe) if optimizer is not None else ()),
    ]


def _found(rule: str, where: str, detail: str, fix: str = "", severity: str = "") -> Finding:
    about = RULES[rule]
    return Finding(
        rule=rule,
        severity=severity or about.severity,
        where=where,
        detail=detail,
        why=about.why,
        fix=fix or about.fix,
    )


def _recipe(recipe: Recipe) -> Iterator[Finding]:
    where = f"recipe {recipe}"
    if recipe.compute == "fp16" and recipe.loss_scale == "none":
        yield _found("fp16-without-scaler", where, "products in FP16, and loss_scale=none", "loss_scale=dynamic")
    if isinstance(recipe.loss_scale, int | float) and recipe.loss_scale <= 1:
        detail = f"loss_scale={recipe.loss_scale:g} scales nothing"
        yield _found("scale-settings", where, detail, "loss_scale=dynamic")
    if recipe.master == "none":
        yield _found(
            "states-16bit", where, "master=none: BF16 weights and nothing beside them", "master=split", WARNING
        )
    if recipe.moments == "bf16":
        detail = "moments=bf16: the second moment moves by 0.1% a step at beta2=0.999, less than BF16's spacing"
        yield _found("states-16bit", where, detail, "moments=8bit, which is smaller and keeps scales, or fp32", WARNING)


def _keepers(model: nn.Module, recipe: Recipe) -> Iterator[Finding]:
    some = [path for path, _ in model.named_modules() if path]
    for pattern in recipe.keep:
        if not any(path and _matches(pattern, path, module) for path, module in model.named_modules()):
            detail = f"keep={pattern} names no module; modules are {', '.join(some[:6])}{', ...' * (len(some) > 6)}"
            yield _found("keep-names-nothing", f"recipe {recipe}", detail)


def _parameters(model: nn.Module) -> Iterator[Finding]:
    narrow = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype in HALVES and not has_master(parameter)
    ]
    if narrow:
        name, first = narrow[0]
        yield _found("half-parameters", name, f"{name} is {HALVES[first.dtype]}{_more(len(narrow))}")
    norms = [
        (path, type(module).__name__)
        for path, module in model.named_modules()
        if "Norm" in type(module).__name__
        and any(one.dtype is torch.float16 for one in (*module.parameters(False), *module.buffers(False)))
    ]
    if norms:
        path, kind = norms[0]
        yield _found("half-norms", path, f"{kind} {path} holds FP16{_more(len(norms))}")


def _dimensions(model: nn.Module, recipe: Recipe) -> Iterator[Finding]:
    multiple = multiple_for(recipe.compute)
    if multiple is None:
        return
    groups: dict[tuple[str, int], Misfit] = {}
    total = 0
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tied_paths = set()
    for path, module, inputs, outputs in _products(model):
        weight = next(iter(module.parameters(recurse=False)))
        total += weight.numel()
        if id(weight) in tied:
            tied_paths.add(path)
        if _is_kept(path, model, recipe):
            continue
        for kind, size in (("inputs", inputs), ("outputs", outputs)):
            if size % multiple and size >= LEAST:
                misfit = groups.setdefault((kind, size), Misfit())
                misfit.paths.append(path)
                misfit.weights += weight.numel()
    for (kind, size), misfit in groups.items():
        share = misfit.weights / total
        gain, best = saved(share, size, recipe.compute), padded(size)
        stays = "; FP8 refuses it, so it stays in BF16" if recipe.compute == "fp8" else ""
        detail = (
            f"{size:,} {kind} are not a multiple of {multiple}{_more(len(misfit.paths))}{stays}; "
            f"{share:.0%} of the weights that are multiplied"
        )
        assumed = "" if recipe.compute == "fp8" else f" (unaligned ones run at {UNALIGNED:g} of the rate on an H200)"
        both = ", with the embedding that shares the weight" if misfit.paths[0] in tied_paths else ""
        more = best / size - 1
        fix = f"pad to {best:,}{both}: {more:.2%} more, and a predicted {gain:.0%} less time in products{assumed}"
        yield _found("off-multiple", misfit.paths[0], detail, fix, "" if gain >= WORTH else NOTE)


def _products(model: nn.Module) -> Iterator[tuple[str, nn.Module, int, int]]:
    """Layers that multiply matrices: path, module, inputs, outputs."""
    for path, module in model.named_modules():
        if is_linear(module) or isinstance(module, nn.Linear):
            outputs, inputs = shape_of(module)
            yield path, module, inputs, outputs
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1:
            yield path, module, module.in_channels, module.out_channels


def _ties(model: nn.Module, recipe: Recipe) -> Iterator[Finding]:
    """A weight of two modules, of which the recipe keeps one in FP32."""
    users: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(path)
    for paths in users.values():
        kept = [path for path in paths if _is_kept(path, model, recipe)]
        if len(paths) > 1 and kept and len(kept) < len(paths):
            other = next(path for path in paths if path not in kept)
            detail = (
                f"{kept[0]} is kept in FP32 and shares its weight with {other}, which is not: the weight is FP32 for "
                "both, and only one computes in it"
            )
            yield _found("tied-formats", kept[0], detail, f"keep={'+'.join(paths)}, or neither", NOTE)


def _optimizer(optimizer: Optimizer, recipe: Recipe) -> Iterator[Finding]:
    kind = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        eps = group.get("eps")
        half = [one for one in group["params"] if one.dtype is torch.float16 and one.requires_grad]
        if isinstance(eps, float) and half and eps < SMALLEST_FP16:
            detail = f"eps={eps:g} of {kind} is 0 in FP16, the format of {len(half)} of its parameters"
            yield _found("eps-below-format", f"optimizer group {number}", detail)
    narrows = recipe.master != "fp32" or recipe.moments != "fp32" or recipe.gradients != "fp32"
    if narrows and not _is_adamw(optimizer):
        yield _found("lean-optimizer", "optimizer", f"{kind} under recipe {recipe}")


def _is_adamw(optimizer: Optimizer) -> bool:
    """AdamW, or an Adam that does the same."""
    if isinstance(optimizer, AdamW):
        return True
    return isinstance(optimizer, Adam) and all(
        (group.get("decoupled_weight_decay", False) or not group["weight_decay"]) and not group.get("amsgrad")
        for group in optimizer.param_groups
    )


def _is_kept(path: str, model: nn.Module, recipe: Recipe) -> bool:
    """Whether the recipe keeps a module in FP32, or one that it is part of."""
    parts = path.split(".")
    owners = [".".join(parts[: index + 1]) for index in range(len(parts))]
    return any(
        _matches(pattern, owner, model.get_submodule(owner)) for pattern in recipe.keep for owner in owners if owner
    )


def _matches(pattern: str, path: str, module: nn.Module) -> bool:
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(type(module).__name__, pattern)


def _more(count: int) -> str:
    return f" ({count - 1} more like it)" if count > 1 else ""
