"""What an engine prepares when it is made: optimizers, converted layers, released gradients, the loss scaler."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Adam, Optimizer

from narrowgauge import kernels
from narrowgauge.hardware import Device
from narrowgauge.nn.convert import Conversion, convert_layers
from narrowgauge.nn.equal_blocks import find_equal_blocks
from narrowgauge.nn.experts.routers import keep_routers
from narrowgauge.nn.find_heads import find_heads
from narrowgauge.nn.keep_fp32 import find_computed_parameters, keep_modules, keep_recurrent
from narrowgauge.nn.matrix_inventory import list_matrices
from narrowgauge.optim import AdamW, convert_optimizer
from narrowgauge.optim.convert_optimizer import can_convert
from narrowgauge.optim.gradient_release import GradientRelease, keep_gradient
from narrowgauge.optim.mastered import MasteredOptimizer, can
from narrowgauge.optim.sharded import replace_values
from narrowgauge.parameters import is_sharded
from narrowgauge.ranks.update_sync import UpdateSync
from narrowgauge.recipe import Recipe
from narrowgauge.scaling.gradient_formats import GradientFormats
from narrowgauge.scaling.loss import LossScaler


def is_emulated(recipe: Recipe, device: Device) -> bool:
    """Return whether a CPU has no native products in the recipe's compute format."""
    return device.kind == "cpu" and recipe.compute not in ("fp32", *device.native)


def is_lean(recipe: Recipe) -> bool:
    """Return whether the recipe needs one of narrowgauge's own optimizers."""
    return recipe.gradients == "released" or (recipe.master, recipe.moments) != ("fp32", "fp32")


def keep_in_fp32(model: nn.Module, recipe: Recipe, device: Device) -> list[str]:
    """Let the modules that the recipe names compute in FP32; return their paths.

    The routers of experts stay in FP32 as well, and recurrent layers where the device cannot train them in 16 bits:
    emulated products do not reach into them, and torch has no LSTM in FP16 for a CPU, whatever it multiplies.
    """
    without_recurrent = is_emulated(recipe, device) or (device.kind == "cpu" and recipe.compute == "fp16")
    kept = keep_modules(model, recipe.keep) + (keep_recurrent(model) if without_recurrent else [])
    return kept + (keep_routers(model) if recipe.compute not in ("fp32", "tf32") else [])


def find_narrowed(
    model: nn.Module, named: Mapping[str, nn.Parameter], recipe: Recipe, kept: Iterable[str]
) -> list[nn.Parameter]:
    """Return the parameters that are BF16 with a master under a lean recipe.

    These are all but vectors (norms, biases) and modules kept in FP32. FSDP needs one dtype for all parameters that it
    shards together, so every sharded parameter becomes BF16.
    """
    if recipe.master == "fp32":
        return []
    in_fp32 = _find_kept_parameters(model, kept)
    return [p for p in named.values() if is_sharded(p) or (p.dim() > 1 and p not in in_fp32 and not p.is_complex())]


def find_stored_narrow(model: nn.Module, recipe: Recipe, kept: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters that are not trained, and that ``recipe.frozen`` stores in fewer bits than FP32.

    These are all but vectors and modules kept in FP32. FSDP chooses the dtype of what it shards.
    """
    if recipe.frozen == "keep":
        return []
    in_fp32 = _find_kept_parameters(model, kept)
    frozen = (p for p in model.parameters() if not p.requires_grad and not is_sharded(p))
    return [p for p in frozen if p.dim() > 1 and p.is_floating_point() and p not in in_fp32]


def store_frozen(model: nn.Module, recipe: Recipe, kept: Iterable[str]) -> None:
    """Round FP32 matrices that are not trained to BF16, in place, if the recipe stores them so.

    Nothing undoes it: what is rounded off is gone.
    """
    for parameter in find_stored_narrow(model, recipe, kept):
        if parameter.dtype is torch.float32:
            replace_values(parameter, parameter.detach().to(torch.bfloat16))


def _find_kept_parameters(model: nn.Module, kept: Iterable[str]) -> set[nn.Parameter]:
    """Return the parameters that stay in FP32 under every recipe, or because the recipe keeps their modules there."""
    named = {p for path in kept for p in model.get_submodule(path).parameters()}
    return named | set(find_computed_parameters(model))


def convert_optimizers(
    optimizers: Sequence[Optimizer],
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    recipe: Recipe,
    kept: Iterable[str],
    sharded: bool,
) -> list[Optimizer]:
    """Replace each optimizer by narrowgauge's where the recipe needs its state formats; return all optimizers.

    An AdamW over shards is replaced under any recipe, because torch's fused optimizers take no ``grad_scale`` for
    DTensors.
    """
    to_bf16 = find_narrowed(model, named, recipe, kept)
    gradients = "fp32" if recipe.gradients == "fp32" else "bf16"
    return [
        convert_optimizer(optimizer, recipe.master, recipe.moments, to_bf16, gradients)
        if is_lean(recipe) or (sharded and isinstance(optimizer, Adam | AdamW) and can_convert(optimizer))
        else optimizer
        for optimizer in optimizers
    ]


def find_blocks_to_compile(model: nn.Module, recipe: Recipe, compile: bool | str) -> list[nn.Module]:
    """Return the blocks that are compiled instead of the model, because they are equal and most of it.

    Only for FP8: the other recipes compute what torch.compile would compute without an engine, as one graph.
    """
    if not compile or recipe.compute != "fp8":
        return []
    return list(find_equal_blocks(model, find_heads(model).values()).values())


def convert_model(
    model: nn.Module,
    recipe: Recipe,
    device: Device,
    fused: bool | None,
    cuda_graphs: bool | None,
    one_graph: bool = False,
) -> Conversion:
    """Convert the layers that the recipe computes differently, and report on every matrix of the model."""
    if fused is None:
        on_gpu = device.kind == "cuda" and kernels.have_triton()
        fused = recipe.compute == "fp8" or (recipe.compute == "bf16" and on_gpu)
    if fused or recipe.emulate != "none":
        return convert_layers(model, recipe, device, cuda_graphs=cuda_graphs, one_graph=one_graph)
    return Conversion(compute=recipe.compute, matrices=list_matrices(model, recipe), gpu=device.gpu)


def warn_of_unused_offload(recipe: Recipe, conversion: Conversion, device: Device) -> None:
    """Warn if inputs of blocks should be offloaded, and no block runs fused."""
    if recipe.offload != "none" and not conversion.blocks:
        known = "no repeated blocks were found" if device.kind == "cuda" else "blocks are fused on a GPU only"
        reason = next(iter(conversion.unfused.values()), f"in this recipe, {known}")
        warnings.warn(f"offload={recipe.offload} has no effect: no block runs fused ({reason})", stacklevel=4)


def make_release(model: nn.Module, recipe: Recipe, optimizers: Iterable[Optimizer], conversion: Conversion) -> Any:
    """Return the ``Release`` that steps parameters during backward, or None if the recipe keeps gradients."""
    for parameter in model.parameters():
        keep_gradient(parameter)  # an earlier engine of the model may have released its gradients
    if recipe.gradients != "released":
        return None
    able = [cast(MasteredOptimizer, optimizer) for optimizer in optimizers if can(optimizer, "release")]
    return GradientRelease(able, conversion.scales)


def make_gradient_formats(conversion: Conversion, update_sync: UpdateSync) -> GradientFormats | None:
    """Return what chooses the format of each gradient; None if the recipe gives one."""
    scales = conversion.scales
    return None if scales is None or not scales.changeable else GradientFormats(scales, update_sync.sum)


def make_scaler(recipe: Recipe, device: torch.device, max_consecutive_skips: int) -> LossScaler | None:
    """Return the loss scaler of the recipe, or None if it does not scale the loss."""
    scale = recipe.loss_scale
    if scale == "none":
        return None
    options: dict[str, Any] = {} if scale == "dynamic" else {"init_scale": float(scale), "dynamic": False}
    return LossScaler(device.type, max_consecutive_skips=max_consecutive_skips, **options)
