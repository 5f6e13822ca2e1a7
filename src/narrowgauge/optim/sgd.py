"""SGD with momentum, in the formats of ``MasteredOptimizer``.

g <- g + decay w
m <- momentum m + (1 - dampening) g       m <- g in the first step
w <- w - lr m                             lr (g + momentum m) with nesterov
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from narrowgauge.optim.mastered import MasteredOptimizer


class SGD(MasteredOptimizer):
    """``torch.optim.SGD`` with a choice of formats for masters, momentum and gradients, per parameter group.

    With the defaults and FP32 parameters it computes the same bits as torch.optim.SGD on a CPU.

    Args:
        params: Parameters or parameter groups, as in torch. A group may set any of the options below.
        lr: Learning rate.
        momentum: How much of the momentum stays in a step.
        dampening: What share of a gradient is not added to the momentum.
        weight_decay: Weight decay, added to the gradient.
        nesterov: Look ahead by one step of the momentum.
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
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        master: str = "fp32",
        moments: str = "fp32",
        gradients: str = "bf16",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "master": master,
            "moments": moments,
            "gradients": gradients,
        }
        super().__init__(params, defaults)

    def get_moment_names(self, parameter: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the name of the momentum, if there is any.

        Args:
            parameter: The parameter.
            group: Its parameter group.

        Returns:
            One name or none.
        """
        return ("momentum_buffer",) if group["momentum"] else ()

    @staticmethod
    def check_options(group: dict[str, Any]) -> Iterable[tuple[str, Any, bool]]:
        """Yield each option of a group, its value, and whether it is in range.

        Args:
            group: The parameter group.
        """
        yield "lr", group["lr"], float(group["lr"]) >= 0
        yield "momentum", group["momentum"], group["momentum"] >= 0
        yield "weight_decay", group["weight_decay"], float(group["weight_decay"]) >= 0
        plain = group["momentum"] <= 0 or group["dampening"] != 0
        yield "nesterov", group["nesterov"], not (group["nesterov"] and plain)

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
        if group["weight_decay"]:
            grad = grad.add(master, alpha=float(group["weight_decay"]))
        if group["momentum"]:  # a schedule may turn it on and off; while it is off, the buffer stays as it is
            momentum = moments["momentum_buffer"]
            if step == 1:
                momentum.copy_(grad)
            else:
                momentum.mul_(group["momentum"]).add_(grad, alpha=1 - group["dampening"])
            grad = grad.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
        master.add_(grad, alpha=-float(group["lr"]))
