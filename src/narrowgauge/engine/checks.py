"""What an engine can train: checks of the model, its optimizers and the numbers given, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from narrowgauge import hardware
from narrowgauge.errors import UsageError
from narrowgauge.optim.masters import has_master
from narrowgauge.recipe import Recipe, refusal


def trainable(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """The parameters the optimizers train, by name; refuses what cannot be trained."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"Engine: the model must be an nn.Module, got {type(model).__name__}")
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise UsageError("Engine: expected a torch optimizer or a list of them")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise UsageError(f"Engine: {type(model).__name__} has no trainable parameters")
    own = {id(p) for p in model.parameters()}
    trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in trained if id(p) not in own]
    if foreign:
        raise UsageError(
            f"Engine: {len(foreign)} of the optimizer's {len(trained)} parameters (the first of shape "
            f"{tuple(foreign[0].shape)}) are not the model's; make the optimizer from model.parameters() once the "
            "model is in place, and hold parameters of a loss in the same module"
        )
    return named


def trained_now(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, or have a gradient although they were frozen since: asked for at every update."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad or p.grad is not None}


def check_runs(recipe: Recipe, device: hardware.Device, named: dict[str, nn.Parameter]) -> None:
    reason = refusal(recipe, device)
    if reason is not None:
        raise UsageError(reason)
    for name, parameter in named.items():
        if parameter.is_floating_point() and parameter.dtype is not torch.float32 and not has_master(parameter):
            raise UsageError(
                f"Engine: parameter {name} is {parameter.dtype}, but recipe {recipe} updates FP32 masters; "
                "call model.float() before making the optimizer"
            )


def checked(name: str, value: float | None, most: float, whole: bool = False) -> float | None:
    if value is None and not whole:
        return None
    kind: Callable[[Any], bool] = (lambda v: isinstance(v, int)) if whole else (lambda v: isinstance(v, int | float))
    if not kind(value) or isinstance(value, bool) or value is None or not 0 < value <= most:
        raise UsageError(f"Engine: {name}={value!r} must be a positive {'whole ' if whole else ''}number")
    return value
