"""One AdamW update of many parameters by the kernel: collects its arguments without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels.adamw import StepScalars, TensorLists, launch_adamw
from narrowgauge.optim.moments import PLASTIC


def step_tensors(
    weights: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
    group: dict[str, Any],
    factor: Tensor | None,
    found: Tensor | None,
    foreign: Tensor,
) -> None:
    """Step parameters that share a group, a device and formats; skip the step if ``found`` is not 0.

    ``foreign`` is raised by the number of groups of weights that something else had written.
    """
    steps = stack_steps(states)
    steps.add_(1.0 if found is None else 1.0 - found)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    low = "remainder" if "remainder" in states[0] else "master"
    lists = TensorLists(
        weight=[weight.detach() for weight in weights],
        grad=[grad.contiguous() for grad in grads],
        first=[state["exp_avg"] for state in states],
        second=[state["exp_avg_sq"] for state in states],
        low=[state[low] for state in states if low in state],
        check=[state["check"] for state in states if "check" in state],
        first_scale=[state["exp_avg_scale"] for state in states if "exp_avg_scale" in state],
        second_scale=[state["exp_avg_sq_scale"] for state in states if "exp_avg_sq_scale" in state],
    )
    ticks = (steps.long() * PLASTIC[1]).to(torch.int32) if lists.first_scale else None
    rates = compute_step_rates(steps, group["lr"], group["weight_decay"], beta1, beta2)
    seeds = make_seeds(states, steps)
    launch_adamw(
        lists, StepScalars(beta1, beta2, group["eps"], group["maximize"], rates, ticks, seeds, factor, found, foreign)
    )


def make_seeds(states: list[dict[str, Any]], steps: Tensor) -> Tensor | None:
    """Return the seeds of stochastic rounding for weights without masters; None if they have masters."""
    if "seed" not in states[0] or {"remainder", "master"} & set(states[0]):
        return None
    own = torch.tensor([state["seed"] for state in states]).to(steps.device, non_blocking=True)
    return (steps.long() * 0x9E3779B1 + own).to(torch.int32)


def compute_step_rates(steps: Tensor, lr: float | Tensor, weight_decay: float, beta1: float, beta2: float) -> Tensor:
    """Return the factors that depend on the step and the learning rate, [n, 3], computed in FP64 on the device."""
    t = steps.double()
    lr = lr.to(steps.device, torch.float64) if isinstance(lr, Tensor) else lr
    keep = torch.ones_like(t) - lr * weight_decay
    return torch.stack([keep, lr / (1 - beta1**t), (1 - beta2**t).rsqrt()], 1).float()


def stack_steps(states: list[dict[str, Any]]) -> Tensor:
    """Return the step counts as one vector, and make the states' counts views of it."""
    first = states[0]["step"]
    flat: Tensor | None = first._base
    together = flat is not None and flat.dim() == 1 and len(flat) == len(states)
    if not (
        together and all(s["step"]._base is flat and s["step"].storage_offset() == i for i, s in enumerate(states))
    ):
        flat = torch.stack([state["step"] for state in states])
        for index, state in enumerate(states):
            state["step"] = flat[index]
    assert flat is not None
    return flat
