"""Lion, in the formats of ``MasteredOptimizer``: every value moves by the learning rate, up or down.

    w <- w (1 - lr decay) - lr sign(beta1 m + (1 - beta1) g)
    m <- beta2 m + (1 - beta2) g

X. Chen and others, Symbolic Discovery of Optimization Algorithms, 2023.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from narrowgauge.optim.mastered import MasteredOptimizer


class Lion(MasteredOptimizer):
    """Lion with a choice of formats for masters, momentum and gradients, per parameter group.

    Args:
        params: Parameters or parameter groups, as in torch. A group may set any of the options below.
        lr: Learning rate; a third to a tenth of what is good for AdamW.
        betas: How much of the momentum is in an update, and how much of it stays.
        weight_decay: Decoupled weight decay.
        maximize: Maximize the objective instead of minimizing it.
        master: Master weights of BF16 parameters, as in ``AdamW``.
        moments: The momentum: "fp32", "bf16", or "8bit" with one scale per 128 values.
        gradients: Gradients of BF16 parameters, as in ``AdamW``.

    Raises:
        UsageError: An option is out of range or unknown, or a parameter has an unsupported dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: str = "fp32",
        moments: str = "fp32",
        gradients: str = "bf16",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "master": master,
            "moments": moments,
            "gradients": gradients,
        }
        super().__init__(params, defaults)

    def get_moment_names(self, parameter: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the name of the momentum.

        Args:
            parameter: The parameter.
            group: Its parameter group.

        Returns:
            One name.
        """
        return ("exp_avg",)

    @staticmethod
    def check_options(group: dict[str, Any]) -> Iterable[tuple[str, Any, bool]]:
        """Yield each option of a group, its value, and whether it is in range.

        Args:
            group: The parameter group.
        """
        beta1, beta2 = group["betas"]
        yield "lr", group["lr"], float(group["lr"]) >= 0
        yield "betas", group["betas"], 0 <= float(beta1) < 1 and 0 <= float(beta2) < 1
        yield "weight_decay", group["weight_decay"], group["weight_decay"] >= 0

    def update(
        self, master: Tensor, grad: Tensor, moments: dict[str, Tensor], group: dict[str, Any], step: int
    ) -> None:
        """Change an FP32 value and its momentum in place.

        Args:
            master: The value.
            grad: The gradient.
            moments: The momentum.
            group: The parameter group.
            step: The number of the step, from 1.
        """
        lr, (beta1, beta2), momentum = float(group["lr"]), group["betas"], moments["exp_avg"]
        if group["weight_decay"]:
            master.mul_(1 - lr * group["weight_decay"])
        master.add_(momentum.lerp(grad, 1 - beta1).sign_(), alpha=-lr)
        momentum.lerp_(grad, 1 - beta2)
