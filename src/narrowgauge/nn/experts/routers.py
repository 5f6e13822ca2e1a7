"""Routers compute in FP32 under every recipe: rounded scores change which experts are chosen.

A router is a module beside experts with a matrix [E, D]: a row for each expert. Experts are two stacks of matrices, or
a list of modules with ``expert`` in its name.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from narrowgauge.nn.experts.find import list_parameters
from narrowgauge.nn.keep_fp32 import KeptInFp32
from narrowgauge.nn.module_changes import apply_change, find_change

REASON = "it chooses experts"


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers of a model by path."""
    found: dict[str, nn.Module] = {}
    for path, count, widths in _list_experts(model):
        owner = path.rpartition(".")[0]
        for name, part in model.get_submodule(owner).named_modules():
            place = f"{owner}.{name}" if owner and name else owner or name
            matrices = list_parameters(part, 2).values()
            alike = any(len(matrix) == count and matrix.shape[1] in widths for matrix in matrices)
            inside = f"{place}.".startswith(f"{path}.")
            if alike and name and not inside and "shared" not in name:  # a shared expert may have as many columns
                found[place] = part
    return found


def _list_experts(model: nn.Module) -> Iterator[tuple[str, int, set[int]]]:
    """Yield the paths of experts, how many there are, and the sizes of what they may read."""
    for path, module in model.named_modules():
        stacks = list(list_parameters(module, 3).values())
        if len(stacks) >= 2 and len({len(stack) for stack in stacks}) == 1 and path:
            yield path, len(stacks[0]), {size for stack in stacks for size in stack.shape[1:]}
        elif isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) > 1 and _is_list_of_experts(path):
            first = next(iter(module.children()))
            matrices = (matrix for part in first.modules() for matrix in list_parameters(part, 2).values())
            yield path, len(module), {size for matrix in matrices for size in matrix.shape}


def _is_list_of_experts(path: str) -> bool:
    name = path.rpartition(".")[2]
    return "expert" in name and "shared" not in name


def explain_router() -> str:
    """Return the reason for a router's format."""
    return f"kept in FP32: {REASON}"


def keep_routers(model: nn.Module) -> list[str]:
    """Let routers compute in FP32; return their paths."""
    found = {path: router for path, router in find_routers(model).items() if find_change(router, KeptInFp32) is None}
    for router in found.values():
        apply_change(router, KeptInFp32(REASON))
    return sorted(found)
