"""Routers compute in FP32 under every recipe: rounded scores change which experts are chosen.

A router is a module beside experts with a matrix [E, D]: a row for each expert. One that is called ``gate`` or
``router`` may have more rows, for choices that are no experts (to skip the layer, or shared experts), and all of its
layers are kept. Experts are two stacks of matrices, in one module or in two, or a list of modules with ``expert`` in
its name, which may be inside of another module with such a name. A list with another name counts if a router by name
is beside it, with one row for each module. A module that PEFT wraps, for adapters of its stacks, is where it was
before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

from narrowgauge.nn.experts.find import list_parameters, list_stacks
from narrowgauge.nn.keep_fp32 import KeptInFp32
from narrowgauge.nn.module_changes import apply_change, find_change

REASON = "it chooses experts"
WRAPPED = "base_layer"
"""What PEFT's wrappers call the module that they adapt."""


class _Experts(NamedTuple):
    """Experts beside which there may be a router."""

    path: str
    number: int
    widths: set[int]
    """The sizes of what they may read."""
    certain: bool = True
    """Whether all stacks have as many matrices, and are beside the router; otherwise only what is called a router is
    one."""
    named: bool = True
    """Whether they are experts by form or name; otherwise a router beside them has as many rows and is no deeper."""


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers of a model by path, and the parts of a router that have matrices."""
    found: dict[str, nn.Module] = {}
    for experts in _list_experts(model):
        owner = experts.path.rpartition(".")[0]
        beside = _find_beside(model, experts, owner)
        while not beside and "expert" in owner.rpartition(".")[2]:  # a module around the list (DeepSpeed)
            owner = owner.rpartition(".")[0]
            beside = _find_beside(model, experts._replace(certain=False), owner)
        found |= beside
    return found


def _find_beside(model: nn.Module, experts: _Experts, owner: str) -> dict[str, nn.Module]:
    """Return the routers of experts that are in a module, by path."""
    found: dict[str, nn.Module] = {}
    modules = dict(model.get_submodule(owner).named_modules())
    for name, part in modules.items():
        place = _join(owner, name)
        inside = f"{place}.".startswith(f"{experts.path}.")
        if not name or inside or "shared" in name:  # a shared expert may have as many columns
            continue
        router = _find_named_router(name)
        if not experts.named and (router is None or "." in router):
            continue
        most = 2 * experts.number if router is not None and experts.named else experts.number
        matrices = [] if router is None and not experts.certain else list_parameters(part, 2).values()
        if any(experts.number <= len(matrix) <= most and _reads(experts, matrix, router) for matrix in matrices):
            found |= _list_parts(modules, owner, router or name)
    return found


def _reads(experts: _Experts, matrix: nn.Parameter, router: str | None) -> bool:
    """Whether a matrix reads what experts may read; the last one of a router with several layers reads its own."""
    return matrix.shape[1] in experts.widths or router is not None


def _find_named_router(name: str) -> str | None:
    """Return the outermost module on a path that is called a router."""
    parts = name.split(".")
    named = (i for i, part in enumerate(parts) if part in ("gate", "wg") or "router" in part or "gating" in part)
    end = next(named, None)
    return None if end is None else ".".join(parts[: end + 1])


def _list_parts(modules: dict[str, nn.Module], owner: str, router: str) -> dict[str, nn.Module]:
    """Return a router and its parts with matrices, by path."""
    return {
        _join(owner, name): part
        for name, part in modules.items()
        if name == router or (name.startswith(f"{router}.") and list_parameters(part, 2))
    }


def _join(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner and name else owner or name


def _list_experts(model: nn.Module) -> Iterator[_Experts]:
    for wrapped, module in model.named_modules():
        path = _strip_wrappers(wrapped)
        stacks = list(list_stacks(module).values())
        if len(stacks) >= 2 and path:
            counts = {len(stack) for stack in stacks}
            yield _Experts(path, min(counts), _list_sizes(stacks), certain=len(counts) == 1)
        elif isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) > 1 and not _is_shared(path):
            members = list(module.children())  # without entries that are None
            named = "expert" in path.rpartition(".")[2]
            if members and (named or len({type(member) for member in members}) == 1):
                matrices = (matrix for part in members[0].modules() for matrix in list_parameters(part, 2).values())
                yield _Experts(path, len(module), {size for matrix in matrices for size in matrix.shape}, named=named)
        singles = {
            name: stack
            for name, part in module.named_children()
            if name != WRAPPED and (stack := _get_single_stack(_unwrap(part))) is not None
        }
        if len(singles) >= 2 and len({len(stack) for stack in singles.values()}) == 1:
            for name, stack in singles.items():
                yield _Experts(_join(path, name), len(stack), _list_sizes(list(singles.values())), certain=False)


def _get_single_stack(module: nn.Module) -> nn.Parameter | None:
    """Return the stack of a module that has one; kernels of convolutions are no stack."""
    stacks = list(list_stacks(module).values())
    return stacks[0] if len(stacks) == 1 and not isinstance(module, _ConvNd) else None


def _list_sizes(stacks: list[nn.Parameter]) -> set[int]:
    return {size for stack in stacks for size in stack.shape[1:]}


def _is_shared(path: str) -> bool:
    return "shared" in path.rpartition(".")[2]


def _strip_wrappers(path: str) -> str:
    """Return the path that a module had before PEFT wrapped it, once for each of its stacks with an adapter."""
    while path.endswith(f".{WRAPPED}"):
        path = path.removesuffix(f".{WRAPPED}")
    return path


def _unwrap(module: nn.Module) -> nn.Module:
    """Return the module that PEFT has wrapped, or the module itself."""
    while isinstance(inner := getattr(module, WRAPPED, None), nn.Module):
        module = inner
    return module


def explain_router() -> str:
    """Return the reason for a router's format."""
    return f"kept in FP32: {REASON}"


def keep_routers(model: nn.Module) -> list[str]:
    """Let routers compute in FP32; return their paths."""
    found = {path: router for path, router in find_routers(model).items() if find_change(router, KeptInFp32) is None}
    for router in found.values():
        apply_change(router, KeptInFp32(REASON))
    return sorted(found)
