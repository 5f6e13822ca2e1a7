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

from torch import Tensor

from narrowgauge.optim.master_access import read_master, write_master
from narrowgauge.optim.moments import load_moment, store_moment


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
    master, foreign = read_master(weight, state)
    m, v = (load_moment(state, name) for name in ("exp_avg", "exp_avg_sq"))
    if rates.weight_decay:
        master.mul_(1 - rates.lr * rates.weight_decay)
    m.lerp_(grad, 1 - rates.beta1)
    v.mul_(rates.beta2).addcmul_(grad, grad, value=1 - rates.beta2)
    size = rates.lr / (1 - rates.beta1**step)
    denominator = (v.sqrt() / (1 - rates.beta2**step) ** 0.5).add_(rates.eps)
    master.addcdiv_(m, denominator, value=-size)
    store_moment(state, "exp_avg", m, int(step))
    store_moment(state, "exp_avg_sq", v, int(step))
    write_master(weight, master, state, int(step))
    return foreign
