"""Muon for matrices, AdamW for everything else, in one optimizer with FP32 masters of BF16 weights.

    m <- m + (g - m)(1 - momentum)
    d <- g + (m - g) momentum             with nesterov; else m
    w <- w (1 - lr decay) - rate orthogonalize(d)

``newton_schulz`` has the orthogonalization and the rate. Parameter groups have a rule, "muon" or "adamw".
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.kernels import use_triton
from narrowgauge.kernels.muon import launch_apply, launch_momentum
from narrowgauge.optim import adamw, sharded
from narrowgauge.optim.master_access import read_master, write_master
from narrowgauge.optim.mastered import MasteredOptimizer
from narrowgauge.optim.moments import get_scale_name, load_moment, store_moment
from narrowgauge.optim.multi_tensor_step import make_seeds, stack_steps
from narrowgauge.optim.muon_groups import RULES, read_rule
from narrowgauge.optim.newton_schulz import (
    ADJUSTMENTS,
    COEFFICIENTS,
    EPS,
    MOST_STEPS,
    STEPS,
    adjust_rate,
    orthogonalize,
)
from narrowgauge.optim.sharded import place_like, shard_like, to_local
from narrowgauge.parameters import is_sharded

BETAS = (0.9, 0.95)
ADAMW_EPS = 1e-8
MUON_RATE = 0.01
"""Learning rates from here on are for orthogonalized updates, not for AdamW."""
SCALE = get_scale_name("momentum_buffer")


class Muon(MasteredOptimizer):
    """``torch.optim.Muon`` with a choice of formats, which steps parameters that are no matrices by AdamW's rule.

    Muon is for the matrices inside of a network. Embeddings and the head are matrices too, but AdamW is better for
    them: ``Muon(split_for_muon(model))``. With FP32 matrices and the defaults it computes the same
    bits as torch.optim.Muon on a CPU.

    Args:
        params: Parameters or parameter groups, as in torch. A group may set any of the options below, and
            ``rule="muon"`` or ``rule="adamw"``; without a rule, matrices have "muon" and other parameters "adamw".
            Groups may name their rule as other versions of Muon do: ``use_muon=False``, ``kind="adamw"``.
        lr: Learning rate.
        weight_decay: Decoupled weight decay, of both rules.
        momentum: How much of the momentum stays in a step.
        nesterov: Look ahead by one step of the momentum.
        ns_coefficients: Coefficients of the Newton-Schulz iteration.
        eps: The smallest norm that a matrix is divided by.
        ns_steps: Number of iterations.
        adjust_lr_fn: How the learning rate depends on a matrix's shape. "original" (also None): larger for tall
            matrices. "match_rms_adamw": such that a learning rate that is good for AdamW is good for Muon.
        adamw_lr: Learning rate of AdamW's rule; default: ``lr``.
        adamw_betas: Its decay rates of moments.
        adamw_eps: Added to its denominator.
        maximize: Maximize the objective instead of minimizing it.
        master: Master weights of BF16 parameters, as in ``AdamW``.
        moments: Momentum and AdamW's moments: "fp32", "bf16", or "8bit" with one scale per 128 values.
        gradients: Gradients of BF16 parameters, as in ``AdamW``.

    Raises:
        UsageError: An option is out of range or unknown, or a parameter does not fit its rule.
    """

    missing_options: ClassVar[dict[str, Any]] = {"maximize": False, "rule": "muon", "betas": BETAS}
    _adamw: dict[str, Any] | None = None
    """The options that only AdamW's rule has, or has other values of; None in a converted torch.optim.Muon."""
    _shares_rate = False
    """Whether a group of AdamW's rule was given no learning rate of its own."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = STEPS,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = BETAS,
        adamw_eps: float = ADAMW_EPS,
        maximize: bool = False,
        master: str = "fp32",
        moments: str = "fp32",
        gradients: str = "bf16",
    ) -> None:
        self._adamw = {"lr": lr if adamw_lr is None else adamw_lr, "eps": adamw_eps, "betas": adamw_betas}
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "rule": None,
            "maximize": maximize,
            "master": master,
            "moments": moments,
            "gradients": gradients,
        }
        super().__init__(params, defaults)
        if adamw_lr is None and self._shares_rate:
            _warn_of_shared_rate(self.defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_adamw": self._adamw}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Without a rule, it becomes one group of matrices and one of other parameters.

        Args:
            param_group: The parameters, and the options in which the group differs from the defaults.

        Raises:
            UsageError: An option is out of range, or two options name different rules; nothing is added then.
            TypeError: The parameters are a set.
        """
        rule, given = read_rule(param_group), param_group["params"]
        if rule is not None:
            parts = {rule: given}
        elif isinstance(given, set):
            raise TypeError("Muon: parameters are a set, which has no order; give a list")  # as torch's optimizers do
        else:
            given = [given] if isinstance(given, Tensor) else list(given)
            by_rule = {rule: [one for one in given if _choose_rule(one) == rule] for rule in RULES}
            parts = {rule: some for rule, some in by_rule.items() if some} or {RULES[0]: []}
        count, adamw_options = len(self.param_groups), self._adamw or {"eps": ADAMW_EPS, "betas": BETAS}
        try:
            for rule, some in parts.items():
                # The constructor's defaults have no betas: schedulers that find some cycle them, not the momentum.
                own = adamw_options if rule == "adamw" else {"betas": adamw_options["betas"]}
                super().add_param_group({**own, **param_group, "params": some, "rule": rule})
        except Exception:
            del self.param_groups[count:]
            raise
        self._shares_rate |= "lr" not in param_group and any(g["rule"] == "adamw" for g in self.param_groups[count:])

    def get_moment_names(self, parameter: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments that the group's rule has.

        Args:
            parameter: The parameter.
            group: Its parameter group.

        Returns:
            The names.
        """
        return ("momentum_buffer",) if group["rule"] == "muon" else adamw.MOMENTS

    @staticmethod
    def check_options(group: dict[str, Any]) -> Iterable[tuple[str, Any, bool]]:
        """Yield each option of a group, its value, and whether it is in range.

        Args:
            group: The parameter group.

        Raises:
            UsageError: A parameter is not a matrix, and has Muon's rule; or an option is not what the iteration needs.
        """
        yield "rule", group["rule"], group["rule"] in RULES
        yield from adamw.check_adamw_options(group)
        yield "momentum", group["momentum"], 0 <= group["momentum"] <= 1
        yield "ns_steps", group["ns_steps"], isinstance(group["ns_steps"], int) and 0 < group["ns_steps"] < MOST_STEPS
        coefficients, adjustment = group["ns_coefficients"], group["adjust_lr_fn"]
        if len(coefficients) != 3 or not all(isinstance(one, int | float) for one in coefficients):
            raise UsageError(f"Muon: ns_coefficients={coefficients}; expected three numbers, for all iterations")
        if adjustment not in ADJUSTMENTS:
            names = ", ".join(repr(name) for name in ADJUSTMENTS)
            raise UsageError(f"Muon: adjust_lr_fn={adjustment!r} is unknown; expected one of {names}")
        other = [p for p in group["params"] if p.dim() != 2] if group["rule"] == "muon" else []
        if other:
            raise UsageError(
                f"Muon: a parameter has the shape {tuple(other[0].shape)}; its rule is for matrices, so give the group "
                'rule="adamw", or none'
            )

    def step_parameters(
        self, parameters: list[nn.Parameter], group: dict[str, Any], factor: Tensor | None, found: Tensor | None
    ) -> None:
        """Step parameters of one group that share a device and formats.

        Args:
            parameters: The parameters; each has a gradient.
            group: Their parameter group.
            factor: What the gradients are divided by, as a tensor on the device; None for 1.
            found: Whether a gradient is not finite, as a tensor; the step then changes nothing. None: not checked.
        """
        if group["rule"] == "adamw":
            adamw.step_by_adamw(self, parameters, group, factor, found)
            return
        states = [self.prepare(parameter, group) for parameter in parameters]
        if use_triton(parameters[0]) and not is_sharded(parameters[0]):
            _step_by_kernels(self, parameters, states, group, factor, found)
            return
        if found is not None and bool(found.item()):
            return
        directions = [
            _find_direction(parameter, state, group, factor)
            for parameter, state in zip(parameters, states, strict=True)
        ]
        options = group["ns_coefficients"], group["ns_steps"], group["eps"]
        moved = [orthogonalize(direction, *options) for direction in directions]
        for parameter, state, direction in zip(parameters, states, moved, strict=True):
            self._apply(parameter, state, direction, group)

    def _apply(self, parameter: nn.Parameter, state: dict[str, Any], direction: Tensor, group: dict[str, Any]) -> None:
        """Decay a weight, and move it by the orthogonalized direction."""
        target, step = to_local(parameter).detach(), int(state["step"].item())
        if not target.numel():  # a rank's shard may be empty
            return
        lr = float(group["lr"])
        rate = adjust_rate(lr, group["adjust_lr_fn"], parameter.shape)
        shard = {name: to_local(value) if isinstance(value, Tensor) else value for name, value in state.items()}
        weight = target.contiguous()
        master, foreign = read_master(weight, shard)
        master.mul_(1 - lr * group["weight_decay"])
        master.add_(to_local(place_like(direction, parameter)).reshape(-1), alpha=-rate)
        write_master(weight, master, shard, step)
        self.get_foreign_count(weight.device).add_(foreign)
        if weight is not target:  # other strides than row-major
            target.copy_(weight)


def _warn_of_shared_rate(defaults: dict[str, Any]) -> None:
    """Warn if a rate that only suits orthogonalized updates is AdamW's as well."""
    lr = float(defaults["lr"])
    if lr >= MUON_RATE and defaults["adjust_lr_fn"] != "match_rms_adamw":
        warnings.warn(
            f"Muon: lr={lr:g} is also the learning rate of the parameters that AdamW steps, and large for AdamW; give "
            'adamw_lr, or adjust_lr_fn="match_rms_adamw" and a rate that is good for AdamW',
            stacklevel=3,
        )


def _choose_rule(parameter: Any) -> str:
    value = parameter[1] if isinstance(parameter, tuple) else parameter  # named parameters are pairs
    return "muon" if isinstance(value, Tensor) and value.dim() == 2 else "adamw"


def _find_direction(
    parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any], factor: Tensor | None
) -> Tensor:
    """Update the momentum of a matrix, and return the direction that is to be orthogonalized: of the whole matrix."""
    weight, grad, shard = sharded.get_shards(parameter, state)
    shard["step"] += 1
    state["step"] = shard["step"]
    grad = grad.float()
    if factor is not None:
        grad = grad / factor
    grad = -grad if group["maximize"] else grad
    if weight.numel():
        momentum = load_moment(shard, "momentum_buffer").view(grad.shape)
        momentum.lerp_(grad, 1 - group["momentum"])
        store_moment(shard, "momentum_buffer", momentum.view(-1), int(state["step"].item()))
        grad = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    if not is_sharded(parameter):
        return grad
    whole: Any = shard_like(grad.to(torch.bfloat16), parameter)
    gathered: Tensor = whole.full_tensor()
    return gathered


def _step_by_kernels(
    optimizer: Muon,
    parameters: list[nn.Parameter],
    states: list[dict[str, Any]],
    group: dict[str, Any],
    factor: Tensor | None,
    found: Tensor | None,
) -> None:
    """Step matrices that share a device and formats, without waiting for the device."""
    places = [place for place, parameter in enumerate(parameters) if parameter.numel()]
    if not places:
        return
    targets = [parameters[place].detach() for place in places]
    states = [states[place] for place in places]
    steps = stack_steps(states)
    steps.add_(1.0 if found is None else 1.0 - found)
    weights = [target.contiguous() for target in targets]
    grads = [_get_grad(parameters[place]) for place in places]
    alike = _find_alike(weights)
    stacks = [weights[0].new_empty((len(some), *weights[some[0]].shape), dtype=torch.bfloat16) for some in alike]
    directions = _spread(alike, stacks)
    launch_momentum(
        grads, [state["momentum_buffer"] for state in states],
        [state[SCALE] for state in states if SCALE in state], directions,
        group["momentum"], group["nesterov"], group["maximize"], factor, found,
    )  # fmt: skip
    options = group["ns_coefficients"], group["ns_steps"], group["eps"]
    moved = _spread(alike, [orthogonalize(stack, *options).contiguous() for stack in stacks])
    low = "remainder" if "remainder" in states[0] else "master"
    launch_apply(
        weights, [state[low] for state in states if low in state],
        [state["check"] for state in states if "check" in state], moved,
        _compute_rates(weights, group), make_seeds(states, steps), found,
        optimizer.get_foreign_count(weights[0].device),
    )  # fmt: skip
    for target, weight in zip(targets, weights, strict=True):
        if weight is not target:  # other strides than row-major
            target.copy_(weight)


def _spread(alike: list[list[int]], stacks: list[Tensor]) -> list[Tensor]:
    """Return the members of stacks in the order of their places."""
    found = {
        place: one for some, stack in zip(alike, stacks, strict=True) for place, one in zip(some, stack, strict=True)
    }
    return [found[place] for place in range(len(found))]


def _get_grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.contiguous()


def _compute_rates(weights: list[Tensor], group: dict[str, Any]) -> Tensor:
    """Return what each weight is multiplied by and the size of its step, [n, 2], on the device."""
    lr = group["lr"]
    ratios = torch.tensor([adjust_rate(1.0, group["adjust_lr_fn"], weight.shape) for weight in weights]).double()
    device = weights[0].device
    if not isinstance(lr, Tensor):
        rates = torch.stack([torch.full_like(ratios, 1 - lr * group["weight_decay"]), ratios * lr], 1).float()
        return rates.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rates
    ratios, lr = ratios.to(device, non_blocking=True), lr.to(device, torch.float64)
    return torch.stack([torch.ones_like(ratios) - lr * group["weight_decay"], ratios * lr], 1).float()


def _find_alike(tensors: list[Tensor]) -> list[list[int]]:
    """Return the places of tensors that have equal shapes."""
    alike: dict[torch.Size, list[int]] = {}
    for place, tensor in enumerate(tensors):
        alike.setdefault(tensor.shape, []).append(place)
    return list(alike.values())
