"""Saving and loading an engine: the model and its optimizers, and the precision state.

The precision state is everything else: loss scale, skip counters, FP8 scales. Libraries that save model and optimizer
themselves (Lightning, Accelerate) save it next to them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from narrowgauge.errors import UsageError
from narrowgauge.optim import full_precision, load_full_precision, plain_state
from narrowgauge.optim.convert_optimizer import drop_masters
from narrowgauge.optim.mastered import can
from narrowgauge.recipe import Recipe, parse
from narrowgauge.scaling.guard import SkipGuard
from narrowgauge.scaling.loss import LossScaler
from narrowgauge.scaling.tensor import TensorScales


def save_training(model: nn.Module, optimizers: Sequence[Optimizer], lean: bool, on_cpu: bool) -> dict[str, Any]:
    """Return the FP32 weights and the optimizers' states.

    Args:
        model: The model, without a DDP wrapper.
        optimizers: The engine's optimizers.
        lean: Whether FP32 weights have to be put together from BF16 weights and the optimizer's remaining bits.
        on_cpu: Whether weights that are put together move to the CPU; shards stay where collectives need them.
    """
    return {
        "model": full_precision(model, "cpu" if on_cpu else None) if lean else model.state_dict(),
        "optimizers": [drop_masters(optimizer.state_dict()) for optimizer in optimizers],
    }


def list_trained(model: nn.Module) -> set[str]:
    """Return the names of the parameters that are trained, in the order of the state dict; all names of tied ones."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}


def _is_trained_part(model: nn.Module, weights: Mapping[str, Any]) -> bool:
    """Whether weights are those that are trained, and no others, of a model that has others."""
    trained = list_trained(model)
    return trained == set(weights) and len(trained) < len(model.state_dict())


def load_training(model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
    """Load what ``save_training`` returned, under the same recipe or another."""
    if len(state["optimizers"]) != len(optimizers):
        raise UsageError(
            f"engine.load_state_dict: the state has {len(state['optimizers'])} optimizers, "
            f"the engine has {len(optimizers)}"
        )
    load_full_precision(model, state["model"], strict=not _is_trained_part(model, state["model"]))
    torch.clear_autocast_cache()  # inside of an engine's context it has 16-bit copies of the old weights
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved if can(optimizer, "any state") else plain_state(saved))


def save_precision(
    recipe: Recipe, scaler: LossScaler | None, guard: SkipGuard, scales: TensorScales | None
) -> dict[str, Any]:
    """Return the loss scale, the skip counters and the FP8 scales."""
    return {
        "recipe": str(recipe),
        "scaler": scaler.state_dict() if scaler else None,
        "guard": guard.state_dict(),
        "tensor_scales": scales.state_dict() if scales else None,
    }


def warn_of_other_recipe(saved: str | None, chosen: Recipe) -> None:
    """Warn if ``auto`` chose another recipe now than when the state was saved: training would change its formats."""
    if saved is not None and parse(saved) != chosen:
        warnings.warn(
            f"the state was saved under recipe {saved}, and auto chose {chosen} now; to train on as before, create the "
            f"engine with recipe={saved!r}",
            stacklevel=4,
        )


def load_precision(
    state: Mapping[str, Any], scaler: LossScaler | None, guard: SkipGuard, scales: TensorScales | None
) -> None:
    """Load what ``save_precision`` returned; of another recipe's state, load what both recipes have."""
    if "guard" not in state:
        raise UsageError("the checkpoint's precision state is not narrowgauge's: it was saved without this recipe")
    if scaler is not None and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    if scales is not None and state.get("tensor_scales"):
        scales.load_state_dict(state["tensor_scales"])
    guard.load_state_dict(state["guard"])
