"""One AdamW update of one parameter in plain torch: the same operations as the kernel, for CPUs and tests.

    w <- w (1 - lr decay)
    m <- m + (g - m)(1 - beta1)
    v <- v beta2 + g^2 (1 - beta2)
    w <- w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Order and roundings are those of torch.optim.AdamW: with FP32 masters and moments the results have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim import moments
from narrowgauge.optim.split_fp32 import is_rounded_from, join, split
from narrowgauge.optim.weight_checksums import GROUP, compute_checksums, expand_groups, find_own_groups


@dataclass(frozen=True)
class Rates:
    """The hyperparameters of one update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


def update(weight: Tensor, grad: Tensor, state: dict[str, Any], rates: Rates, factor: Tensor | None = None) -> int:
    """Step ``weight`` and ``state`` in place. The gradient is first divided by ``factor``.

    Returns the number of groups of the weight that something else had written since the last update.
    """
    state["step"] += 1
    step = state["step"].item()
    grad = grad.float()
    if factor is not None:
        grad = grad / factor
    grad = (-grad if rates.maximize else grad).reshape(-1)
    master, foreign = _load_master(weight, state)
    m, v = _load_moments(state)
    if rates.weight_decay:
        master.mul_(1 - rates.lr * rates.weight_decay)
    m.lerp_(grad, 1 - rates.beta1)
    v.mul_(rates.beta2).addcmul_(grad, grad, value=1 - rates.beta2)
    size = rates.lr / (1 - rates.beta1**step)
    denominator = (v.sqrt() / (1 - rates.beta2**step) ** 0.5).add_(rates.eps)
    master.addcdiv_(m, denominator, value=-size)
    _store_moments(state, m, v, int(step))
    _store_master(weight, master, state, int(step))
    return foreign


def _load_master(weight: Tensor, state: dict[str, Any]) -> tuple[Tensor, int]:
    """Return the flat FP32 weight (the weight itself if it is FP32), and the number of overwritten groups."""
    flat = weight.detach().view(-1)
    if "master" in state:
        master: Tensor = state["master"].view(-1)
        own = is_rounded_from(flat, master)
        if own.all():
            return master, 0
        master.copy_(torch.where(own, master, flat.float()))
        return master, len((~own).nonzero().div(GROUP, rounding_mode="floor").unique())
    if "remainder" in state:
        remainder, own = state["remainder"].view(-1), find_own_groups(flat, state["check"])
        foreign = int((~own).sum())
        if foreign:
            remainder = torch.where(expand_groups(own, len(flat)), remainder, 0)
        return join(flat, remainder), foreign
    return (flat if flat.dtype is torch.float32 else flat.float()), 0


def _store_master(weight: Tensor, master: Tensor, state: dict[str, Any], step: int) -> None:
    flat = weight.detach().view(-1)
    if "remainder" in state:
        high, low = split(master)
        flat.copy_(high)
        state["remainder"].view(-1).copy_(low)
        state["check"].copy_(compute_checksums(high))
    elif "master" in state:
        flat.copy_(split(master)[0])
    elif flat.dtype is torch.bfloat16:
        flat.copy_(round_stochastically(master, step, state["seed"]))


def _load_moments(state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    first, second = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
    if "exp_avg_scale" in state:
        return (
            moments.decode_first(first, state["exp_avg_scale"]),
            moments.decode_second(second, state["exp_avg_sq_scale"]),
        )
    return (first, second) if first.dtype is torch.float32 else (first.float(), second.float())


def _store_moments(state: dict[str, Any], m: Tensor, v: Tensor, step: int) -> None:
    first, second = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
    if "exp_avg_scale" in state:
        for target, scale, (codes, scales) in (
            (first, "exp_avg_scale", moments.encode_first(m)),
            (second, "exp_avg_sq_scale", moments.encode_second(v, step)),
        ):
            target.copy_(codes)
            state[scale].copy_(scales)
    elif first.dtype is not torch.float32:
        first.copy_(m)
        second.copy_(v)


def round_stochastically(master: Tensor, step: int, seed: int) -> Tensor:
    """Round FP32 to BF16, up or down so that the mean is right; deterministic for a step and seed."""
    index = torch.arange(master.numel(), device=master.device)
    noise = mix(index ^ mix(torch.tensor(step * 0x9E3779B1 + seed, device=master.device))) & 0xFFFF
    bits = master.view(torch.int32)
    finite = (bits & 0x7F800000) != 0x7F800000
    raised = (bits.long() + noise).to(torch.int32)
    return (torch.where(finite, raised, bits) >> 16).to(torch.int16).view(torch.bfloat16)


def mix(x: Tensor) -> Tensor:
    """Hash 32 bits, in int64, with two multiplications that affect every bit (lowbias32)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
