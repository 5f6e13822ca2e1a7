"""Chooses the recipe of ``auto`` for a model on a device, and says why.

    CPU, and GPUs without FP8   by the device alone (recipe.choose)
    GPUs with FP8               fp8 if it is predicted (nn/predict_speed.py) to be at least MIN_GAIN times as fast as
                                both BF16 with torch.compile and BF16 with the engine's own options; otherwise bf16

Both choices train with the fields that ``auto[...]`` fixes. The choice depends on the model, the GPU, ``compile`` and
``fused``, and may change between versions. A run records what was chosen, and resumes with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from narrowgauge import kernels
from narrowgauge.engine.checks import check_recipe
from narrowgauge.errors import one_line
from narrowgauge.hardware import Device, is_assumed
from narrowgauge.nn.convert import plan_conversion
from narrowgauge.nn.module_changes import remove_changes
from narrowgauge.nn.speed_advice import explain_slow
from narrowgauge.parameters import is_sharded
from narrowgauge.ranks.distribute import unwrap_ddp
from narrowgauge.ranks.update_sync import find_group
from narrowgauge.recipe import NAMED, Recipe, choose, is_auto, parse
from narrowgauge.task import Task

MIN_GAIN = 1.1
"""How much faster FP8 must be predicted to be. Predictions are off by up to 7% for fused and compiled models."""


def depends_on_model(recipe: str | Recipe, device: Device) -> bool:
    """Return whether ``auto`` chooses by the model as well: on a GPU with FP8, unless the text fixes ``compute``."""
    if not is_auto(recipe) or device.kind != "cuda" or "fp8" not in device.native:
        return False
    return parse(recipe, device).compute == "bf16"


def choose_recipe(
    recipe: str | Recipe,
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    device: Device,
    *,
    compile: bool = False,
    fused: bool | None = None,
) -> tuple[Recipe, str | None]:
    """Return the recipe of an engine, and why ``auto`` chose it; None if the recipe was named.

    Ranks that train a model together take the choice of the first one: another GPU may have measured other times.

    Args:
        recipe: The recipe or its text.
        model: The model, which may be wrapped by DDP or sharded. Changes of an earlier engine are removed from it.
        named: Its trainable parameters, by name.
        device: Its device.
        compile: As for ``Engine``.
        fused: As for ``Engine``.
    """
    if not is_auto(recipe):
        return parse(recipe, device), None
    if not depends_on_model(recipe, device):
        return parse(recipe, device), choose(device)[1]
    check_recipe(parse(recipe, device), device, named)  # before anything is changed
    remove_changes(model)
    can_compile = not any(map(is_sharded, named.values()))
    chosen, reason = choose_for_model(
        recipe, unwrap_ddp(model), device, compile=bool(compile) and can_compile, fused=fused, can_compile=can_compile
    )
    group = find_group(model, named)
    if group is None:
        return chosen, reason
    choice = [str(chosen), reason]
    dist.broadcast_object_list(choice, src=dist.get_global_rank(group, 0), group=group)
    return parse(choice[0]), choice[1]


def choose_for_model(
    recipe: str | Recipe,
    model: nn.Module,
    device: Device,
    *,
    compile: bool = False,
    fused: bool | None = None,
    can_compile: bool = True,
) -> tuple[Recipe, str]:
    """Return the recipe that ``auto`` chooses for a model on a GPU with FP8, and the reason.

    Args:
        recipe: ``auto``, or ``auto[...]`` with some fields fixed.
        model: The model, unchanged. Its parameters may be on the meta device.
        device: The GPU.
        compile: Whether the engine compiles the model if no block is fused.
        fused: As for ``Engine``.
        can_compile: Whether the engine could compile it.
    """
    bf16, fp8 = parse(recipe, device), parse(recipe, device, NAMED["fp8"])
    if fused is False:
        return bf16, "with fused=False no layer is converted to FP8"
    if device.gpu is None:
        return bf16, f"{device.name} is not in the table of GPUs, so the speed of FP8 cannot be predicted"
    if not kernels.have_triton() and not is_assumed():
        return bf16, "FP8 is fast only with Triton's kernels, and Triton is not installed"
    conversion = plan_conversion(model, fp8, device)
    compiled = compile and not conversion.blocks
    speed = conversion.predict_speed(compiled)
    if speed is None:
        return bf16, "the model has no matrix product that FP8 could make faster"
    base = "BF16 with torch.compile" if speed.in_bf16 <= 1 else "BF16 in the same fused blocks"
    gain = speed.as_converted / max(1.0, speed.in_bf16)
    how = f"{len(conversion.blocks)} blocks are fused" if conversion.blocks else "it is compiled" if compiled else ""
    if gain >= MIN_GAIN:
        how = how or "its layers are wide"
        return fp8, f"FP8 is predicted to be {gain:.1f} times as fast as {base} on {device.name}: {how}"
    slow = explain_slow(conversion, compiled=compiled, can_compile=can_compile and not conversion.blocks)
    return (
        bf16,
        slow or f"FP8 is predicted to be {gain:.2f} times as fast as {base}, which is too little to change format",
    )


def choose_for_task(
    recipe: str | Recipe, task: Task, device: Device, *, compile: bool = False
) -> tuple[Recipe, str | None]:
    """Return the recipe of a task before its model exists, and why ``auto`` chose it; None if the recipe was named.

    The model is made without weights, on the meta device. If it cannot be, the device alone decides.

    Args:
        recipe: The recipe or its text.
        task: The task.
        device: The device it trains on.
        compile: As for ``Engine``.
    """
    if not is_auto(recipe):
        return parse(recipe, device), None
    if not depends_on_model(recipe, device):
        return parse(recipe, device), choose(device)[1]
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = task.model()
            return choose_for_model(recipe, model, device, compile=compile)
    except Exception as error:  # a user's model may fail in any way on the meta device
        why = one_line(f"{type(error).__name__}: {error}", 120)
        return parse(recipe, device), f"the model cannot be made without weights, so FP8 was not predicted ({why})"
