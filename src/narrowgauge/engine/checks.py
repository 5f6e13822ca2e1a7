"""Checks of an engine's arguments: the model, its optimizers and the numbers, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge import hardware
from narrowgauge.errors import UsageError
from narrowgauge.optim.masters import has_master
from narrowgauge.recipe import Recipe, refusal

MAX_ACCUMULATE = 1_000_000


def find_trainable(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """Return the model's trainable parameters by name.

    Raises:
        UsageError: The model has none, or an optimizer has parameters that are not the model's.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"Engine: the model must be an nn.Module, got {type(model).__name__}")
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise UsageError("Engine: expected a torch optimizer or a list of them")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise UsageError(f"Engine: {type(model).__name__} has no trainable parameters")
    own = {id(p) for p in model.parameters()}
    optimized = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in optimized if id(p) not in own]
    if foreign:
        raise UsageError(
            f"Engine: {len(foreign)} of the optimizer's {len(optimized)} parameters (the first has shape "
            f"{tuple(foreign[0].shape)}) are not the model's; create the optimizer from model.parameters() after "
            "wrapping or moving the model, and register the parameters of a loss in the same module"
        )
    return named


def check_apart(optimizers: Sequence[Optimizer], named: Mapping[str, nn.Parameter]) -> None:
    """Raise UsageError if two optimizers of one update have a parameter in common: both would step it.

    Args:
        optimizers: The optimizers that step together.
        named: The trained parameters by name.
    """
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers if len(optimizers) > 1 else ()):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if owners.setdefault(id(parameter), number) != number:
                name = next((name for name, p in named.items() if p is parameter), "a parameter")
                raise UsageError(
                    f"engine.step: two optimizers have {name}, and both would step it; remove it from one of them "
                    "(tied weights are one parameter), or pass the optimizer that is to step: engine.step(optimizer)"
                )


def find_trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of one update: all that require a gradient, and those frozen since that still have one."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad or p.grad is not None}


def check_recipe(recipe: Recipe, device: hardware.Device, named: Mapping[str, nn.Parameter]) -> None:
    """Raise UsageError if the device cannot run the recipe or the parameters have the wrong dtype."""
    reason = refusal(recipe, device)
    if reason is not None:
        raise UsageError(reason)
    for name, parameter in named.items():
        if parameter.is_floating_point() and parameter.dtype is not torch.float32 and not has_master(parameter):
            raise UsageError(
                f"Engine: parameter {name} is {parameter.dtype}, but recipe {recipe} updates FP32 master weights; "
                "call model.float() before creating the optimizer"
            )


def check_clip_norm(value: float | None) -> float | None:
    """Return ``clip_norm`` if it is None or a positive number."""
    if value is not None and not (_is_number(value, (int, float)) and 0 < value <= math.inf):
        raise UsageError(f"Engine: clip_norm={value!r} must be a positive number")
    return value


def check_accumulate(value: int) -> int:
    """Return ``accumulate`` if it is a positive whole number."""
    if not (_is_number(value, (int,)) and 0 < value <= MAX_ACCUMULATE):
        raise UsageError(f"Engine: accumulate={value!r} must be a positive whole number")
    return value


def _is_number(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def list_optimizers(given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return an engine's optimizers as a list; raise UsageError for what is none."""
    found: list[Any] = list(given) if not hasattr(given, "param_groups") and isinstance(given, Iterable) else [given]
    for one in found:
        if not hasattr(one, "param_groups"):
            raise UsageError(f"Engine: expected an optimizer or a list of them, got {type(one).__name__}")
    return found


def check_no_closure(optimizers: Sequence[Optimizer]) -> None:
    """Raise UsageError for optimizers that evaluate the loss several times per step."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "Engine: LBFGS evaluates the loss several times per step through a closure, which an engine's step "
                "does not support; use it in plain torch (FP32), or choose another optimizer"
            )


def check_loss(loss: Tensor) -> None:
    """Raise UsageError unless the loss is a scalar with a graph."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss).__name__)
        raise UsageError(f"engine.backward needs a scalar loss, got {got}; take its mean or sum first")
    if not loss.requires_grad:
        raise UsageError(
            "engine.backward: the loss has no graph; compute it from engine.model's output with gradients enabled"
        )


def check_own_optimizer(optimizer: object, own: Sequence[Optimizer]) -> None:
    """Raise UsageError unless the optimizer is one of the engine's ``own``."""
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        raise UsageError("engine.step takes no closure: call engine.forward and engine.backward yourself, then step")
    if not any(optimizer is one for one in own):
        raise UsageError("engine.step: the optimizer is not one of this engine's")
