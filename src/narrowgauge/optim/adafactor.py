"""Adafactor, with masters of ``MasteredOptimizer``: the second moment of a matrix is a row and a column.

    v      <- mean of g^2 over rows and over columns, averaged with 1 - t^decay; their product estimates g^2
    w      <- w (1 - lr weight_decay) - size g / sqrt(v) / max(1, RMS(g / sqrt(v)) / d)
    size   =  max(eps2, RMS(w)) min(lr, 1 / sqrt(t))

N. Shazeer and M. Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018. The order of operations is
that of torch.optim.Adafactor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.optim.mastered import MasteredOptimizer
from narrowgauge.parameters import is_sharded

EPS1 = torch.finfo(torch.float32).eps


class Adafactor(MasteredOptimizer):
    """``torch.optim.Adafactor`` with a choice of formats for masters and gradients, per parameter group.

    With the defaults and FP32 parameters it computes the same bits as torch.optim.Adafactor on a CPU. Its states are so
    small that they are always FP32. Parameters must not be sharded: rows and columns are of whole matrices.

    Args:
        params: Parameters or parameter groups, as in torch. A group may set any of the options below.
        lr: Largest relative step size.
        beta2_decay: Exponent of the number of the step, by which averages become longer.
        eps: The smallest root of a second moment, None for FP32's epsilon; and the smallest size of weights that steps
            are relative to.
        d: Updates whose RMS is above this are scaled down to it.
        weight_decay: Decoupled weight decay.
        maximize: Maximize the objective instead of minimizing it.
        master: Master weights of BF16 parameters, as in ``AdamW``.
        moments: Has no effect, as there are no moments of single values; recipes set it.
        gradients: Gradients of BF16 parameters, as in ``AdamW``.

    Raises:
        UsageError: An option is out of range or unknown, or a parameter is sharded or has an unsupported dtype.
    """

    other_states: ClassVar[tuple[str, ...]] = ("row_var", "col_var", "variance")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: str = "fp32",
        moments: str = "fp32",
        gradients: str = "bf16",
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "master": master,
            "moments": moments,
            "gradients": gradients,
        }
        super().__init__(params, defaults)

    def get_moment_names(self, parameter: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        """Return no name: there are no moments of single values.

        Args:
            parameter: The parameter.
            group: Its parameter group.

        Returns:
            No name.
        """
        return ()

    def make_other_states(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return a row and a column for a matrix, or the second moment of a vector.

        Args:
            parameter: The parameter.
            group: Its parameter group.

        Returns:
            The states by name.
        """
        options: dict[str, Any] = {"dtype": torch.float32, "device": parameter.device}
        if parameter.dim() < 2:
            return {"variance": torch.zeros(parameter.shape, **options)}
        *rest, rows, columns = parameter.shape
        return {
            "row_var": torch.zeros((*rest, rows, 1), **options),
            "col_var": torch.zeros((*rest, 1, columns), **options),
        }

    @staticmethod
    def check_options(group: dict[str, Any]) -> Iterable[tuple[str, Any, bool]]:
        """Yield each option of a group, its value, and whether it is in range.

        Args:
            group: The parameter group.

        Raises:
            UsageError: A parameter is sharded.
        """
        eps1, eps2 = group["eps"]
        yield "lr", group["lr"], float(group["lr"]) >= 0
        yield "beta2_decay", group["beta2_decay"], group["beta2_decay"] <= 0
        yield "eps", group["eps"], (eps1 is None or eps1 >= 0) and eps2 >= 0
        yield "d", group["d"], group["d"] >= 1
        yield "weight_decay", group["weight_decay"], group["weight_decay"] >= 0
        if any(is_sharded(parameter) for parameter in group["params"]):
            raise UsageError("Adafactor: a parameter is sharded (DTensor), but rows and columns are of whole matrices")

    def update(
        self, master: Tensor, grad: Tensor, moments: dict[str, Tensor], group: dict[str, Any], step: int
    ) -> None:
        """Change an FP32 value and its states in place.

        Args:
            master: The value.
            grad: The gradient.
            moments: Row and column, or the second moment.
            group: The parameter group.
            step: The number of the step, from 1.
        """
        lr, (eps1, eps2) = float(group["lr"]), group["eps"]
        eps1, weight = EPS1 if eps1 is None else eps1, float(step) ** group["beta2_decay"]
        size = max(eps2, master.norm(2).item() / master.numel() ** 0.5) * min(lr, 1 / float(step) ** 0.5)
        if group["weight_decay"]:
            master.mul_(1 - lr * group["weight_decay"])
        if grad.dim() > 1:
            row, column = moments["row_var"], moments["col_var"]
            row.lerp_(torch.norm(grad, dim=-1, keepdim=True).square_().div_(grad.size(-1)), weight)
            column.lerp_(torch.norm(grad, dim=-2, keepdim=True).square_().div_(grad.size(-2)), weight)
            estimate = row @ column
            estimate.div_(row.mean(dim=-2, keepdim=True).clamp_(min=eps1))
        else:
            estimate = moments["variance"].lerp_(grad * grad, weight).clone()
        change = estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(grad)
        limit = max(1.0, change.norm(2).item() / (change.numel() ** 0.5 * group["d"]))
        master.add_(change, alpha=-size / limit)
