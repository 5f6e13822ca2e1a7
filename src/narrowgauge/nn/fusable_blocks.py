"""Finds the blocks of a model that a recipe fuses, and describes one of them again when its settings change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge import events
from narrowgauge.hardware import Device, is_assumed
from narrowgauge.nn import recompute
from narrowgauge.nn.blocks.example import allow_nondeterminism
from narrowgauge.nn.blocks.find import NO_MEMORY, FoundBlocks, describe_block, find_blocks
from narrowgauge.nn.blocks.spec import BlockSpec
from narrowgauge.nn.fused.make_plan import find_misfit
from narrowgauge.nn.fused.verify import find_difference
from narrowgauge.nn.matrix_inventory import explain_kept_fp32
from narrowgauge.recipe import Recipe

CPU = torch.device("cpu")
EXPLAIN_GRANULARITY = "fused blocks cast with one scale per tensor, and the recipe has more than one"


def find_fusable_blocks(model: nn.Module, recipe: Recipe, device: Device) -> FoundBlocks:
    """Find the blocks to fuse; those with a part that stays in FP32 are not."""
    if recipe.granularity != "tensor":
        return FoundBlocks(reasons=dict.fromkeys(recompute.find_blocks(model), EXPLAIN_GRANULARITY))
    with _alone():
        installed = device.kind == "cuda" and not is_assumed() and torch.cuda.is_available()
        other = torch.device(device.torch_device if installed else "cpu")
        found = find_blocks(model, _choose_place(model, other), find_difference)
    modules = dict(model.named_modules(remove_duplicate=False))  # blocks may share an activation or dropout
    for path, spec in list(found.specs.items()):
        reason = find_misfit(modules[path], spec) or _find_fp32_part(path, spec, modules, recipe)
        if reason is not None:
            del found.specs[path]
            found.reasons[path] = reason
    return found


def _find_fp32_part(path: str, spec: BlockSpec, modules: dict[str, nn.Module], recipe: Recipe) -> str | None:
    for name, _ in modules[path].named_modules():
        if spec.mlp and name.startswith(f"{spec.mlp}."):
            continue  # it runs as a module
        kept = explain_kept_fp32(modules, f"{path}.{name}", recipe) if name else None
        if kept:
            return f"{name} stays in FP32: {kept}"
    return None


def describe_again(block: nn.Module) -> BlockSpec | str:
    """Describe a block as it is now, in the middle of a training, or return why it cannot be fused."""
    with _alone(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        found = describe_block(block, _choose_place(block, CPU), find_difference)
        return describe_block(block, CPU, find_difference) if found is NO_MEMORY else found


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Context manager for examples: they are real, always, compared with a tolerance, and nobody listens to them."""
    with events.paused(), _disable_current_modes(), torch._C.DisableTorchFunction(), allow_nondeterminism():
        yield


def _choose_place(model: nn.Module, other: torch.device) -> torch.device:
    """Return the device of a model's parameters, or another one if they have no values."""
    first = next(model.parameters())
    return other if first.device.type == "meta" or is_fake(first) else first.device
