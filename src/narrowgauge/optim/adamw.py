"""AdamW with separate formats for masters, moments and gradients; steps all parameters in one launch.

Parameters may be complex: their real and imaginary parts are stepped in FP32, as in torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from narrowgauge.kernels import use_triton
from narrowgauge.optim import sharded
from narrowgauge.optim.adamw_reference import Rates, update
from narrowgauge.optim.mastered import MasteredOptimizer
from narrowgauge.optim.masters import join_fp32
from narrowgauge.optim.multi_tensor_step import step_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")

full = join_fp32  # the former name, for existing scripts


class AdamW(MasteredOptimizer):
    """``torch.optim.AdamW`` with a choice of formats for masters, moments and gradients, per parameter group.

    With the defaults and FP32 parameters it computes the same bits as torch.optim.AdamW on a CPU. Parameters are FP32,
    BF16 or complex64.

    Args:
        params: Parameters or parameter groups, as in torch. A group may set any of the options below.
        lr: Learning rate; a tensor is allowed.
        betas: Decay rates of the first and second moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        maximize: Maximize the objective instead of minimizing it.
        master: Master weights of BF16 parameters. "fp32": an FP32 copy. "split": 16 more bits that complete the
            parameter to an exact FP32 master. "none": no master; updates are rounded stochastically.
        moments: "fp32", "bf16", or "8bit" with one scale per 128 values.
        gradients: Gradients of BF16 parameters: "bf16", or "fp32", in which autograd then accumulates them.

    Raises:
        UsageError: An option is out of range or unknown, or a parameter has an unsupported dtype.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.complex64)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        master: str = "fp32",
        moments: str = "fp32",
        gradients: str = "bf16",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "master": master,
            "moments": moments,
            "gradients": gradients,
        }
        super().__init__(params, defaults)

    def get_moment_names(self, parameter: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of both moments.

        Args:
            parameter: The parameter.
            group: Its parameter group.

        Returns:
            The names.
        """
        return MOMENTS

    @staticmethod
    def check_options(group: dict[str, Any]) -> Iterable[tuple[str, Any, bool]]:
        """Yield each option of a group, its value, and whether it is in range.

        Args:
            group: The parameter group.
        """
        yield from check_adamw_options(group)

    def step_parameters(
        self, parameters: list[nn.Parameter], group: dict[str, Any], factor: Tensor | None, found: Tensor | None
    ) -> None:
        """Step parameters of one group that share a device and formats: on a GPU in one launch.

        Args:
            parameters: The parameters; each has a gradient.
            group: Their parameter group.
            factor: What the gradients are divided by, as a tensor on the device; None for 1.
            found: Whether a gradient is not finite, as a tensor; the step then changes nothing. None: not checked.
        """
        step_by_adamw(self, parameters, group, factor, found)


def check_adamw_options(group: dict[str, Any]) -> Iterable[tuple[str, Any, bool]]:
    """Yield each option of AdamW's rule, its value, and whether it is in range."""
    beta1, beta2 = group["betas"]
    yield "lr", group["lr"], float(group["lr"]) >= 0
    yield "betas", group["betas"], 0 <= float(beta1) < 1 and 0 <= float(beta2) < 1
    yield "eps", group["eps"], group["eps"] >= 0
    yield "weight_decay", group["weight_decay"], group["weight_decay"] >= 0


def step_by_adamw(
    optimizer: MasteredOptimizer,
    parameters: list[nn.Parameter],
    group: dict[str, Any],
    factor: Tensor | None,
    found: Tensor | None,
) -> None:
    """Step parameters of an optimizer by AdamW's rule; the arguments are those of ``step_parameters``."""
    targets, weights, grads, shards = [], [], [], []
    for parameter in parameters:
        state = optimizer.prepare(parameter, group)
        weight, grad, shard = sharded.get_shards(parameter, state)
        if weight.numel():
            weight, grad, shard = _view_as_real(weight.detach(), grad, shard)
            targets.append(weight)
            weights.append(weight.contiguous())
            grads.append(grad)
            shards.append((state, shard))
        else:  # a rank's shard may be empty
            state["step"] += 1.0 if found is None else 1.0 - found
    states = [shard for _, shard in shards]
    if not weights:
        return
    foreign = optimizer.get_foreign_count(weights[0].device)
    if use_triton(weights[0]):
        step_tensors(weights, grads, states, group, factor, found, foreign)
    elif found is None or not bool(found.item()):
        for weight, grad, state in zip(weights, grads, states, strict=True):
            foreign += update(weight, grad, state, _get_rates(group), factor)
    for target, weight in zip(targets, weights, strict=True):
        if weight is not target:  # other strides than row-major
            target.copy_(weight)
    for state, shard in shards:
        state["step"] = shard["step"]


def _view_as_real(weight: Tensor, grad: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return a complex weight, its gradient and moments as real views; other dtypes unchanged."""
    if not weight.is_complex():
        return weight, grad, state
    state = {**state, **{name: torch.view_as_real(state[name]) for name in MOMENTS}}
    return torch.view_as_real(weight), torch.view_as_real(grad.to(weight.dtype).resolve_conj()), state


def _get_rates(group: dict[str, Any]) -> Rates:
    beta1, beta2 = group["betas"]
    return Rates(float(group["lr"]), float(beta1), float(beta2), group["eps"], group["weight_decay"], group["maximize"])
