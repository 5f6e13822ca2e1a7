"""Puts narrowgauge's AdamW in the place of a user's, with the user's groups and rates, and brings states across.

The new optimizer shares the old one's parameter groups: a scheduler that was made for the old one moves the new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, Optimizer

from narrowgauge.errors import UsageError
from narrowgauge.optim import moments as eight_bit
from narrowgauge.optim.adamw import FORMATS, AdamW, narrow, widen_gradient
from narrowgauge.optim.sharded import check_gradients


def take_over(
    optimizer: Optimizer, master: str, moments: str, narrowed: Iterable[nn.Parameter], gradients: str = "bf16"
) -> AdamW:
    """An AdamW with these formats for the optimizer's parameters, of which ``narrowed`` become BF16."""
    formats = {"master": master, "moments": moments, "gradients": gradients}
    if not isinstance(optimizer, AdamW):
        _check(optimizer)
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in narrowed:
        if parameter in own:
            if parameter.grad is not None:
                raise UsageError("lean recipe: a parameter has a gradient already; make the engine before backward")
            check_gradients(parameter, gradients)
            widen_gradient(narrow(parameter), gradients)
    if isinstance(optimizer, AdamW):
        new = optimizer
    else:
        new = AdamW([torch.nn.Parameter(torch.zeros(()))])
        new.param_groups = optimizer.param_groups
        new.stands_for = optimizer
    for group in new.param_groups:
        group.update(formats)
        group.setdefault("maximize", False)
    if optimizer.state:
        state = optimizer.state_dict()
        optimizer.state.clear()
        new.load_state_dict(state)
        for group in new.param_groups:  # what the state's groups said is what they said before
            group.update(formats)
    return new


def can_take_over(optimizer: Optimizer) -> bool:
    """Whether an optimizer is an AdamW, by whatever name, that ours can stand for."""
    if isinstance(optimizer, AdamW):
        return True
    decoupled = isinstance(optimizer, Adam) and all(
        group.get("decoupled_weight_decay", False) or not group["weight_decay"] for group in optimizer.param_groups
    )
    return decoupled and not any(group.get("amsgrad") for group in optimizer.param_groups)


def _check(optimizer: Optimizer) -> None:
    if not can_take_over(optimizer):
        raise UsageError(
            f"a lean recipe steps AdamW with narrow states, not {type(optimizer).__name__} (nor amsgrad, nor Adam's "
            "coupled weight decay); take torch.optim.AdamW, or a recipe with master=fp32 and moments=fp32"
        )


def plain_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state of narrowgauge's AdamW as torch.optim.AdamW keeps it: FP32 moments, no masters."""
    states: dict[Any, Any] = {}
    for index, saved in state_dict["state"].items():
        if "exp_avg" not in saved or not ({"exp_avg_scale", "remainder", "master"} & set(saved)):
            states[index] = saved
            continue
        first, second = saved["exp_avg"], saved["exp_avg_sq"]
        if "exp_avg_scale" in saved:
            first = eight_bit.decode_first(first.reshape(-1), saved["exp_avg_scale"]).view(first.shape)
            second = eight_bit.decode_second(second.reshape(-1), saved["exp_avg_sq_scale"]).view(second.shape)
        states[index] = {"step": saved["step"], "exp_avg": first.float(), "exp_avg_sq": second.float()}
    groups = [{k: v for k, v in group.items() if k not in FORMATS} for group in state_dict["param_groups"]]
    return {"state": states, "param_groups": groups}


def without_masters(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state without remainders and copies, for checkpoints whose model is in FP32 already."""
    states = {
        index: {name: value for name, value in saved.items() if name not in ("remainder", "master")}
        for index, saved in state_dict["state"].items()
    }
    return {**state_dict, "state": states}
