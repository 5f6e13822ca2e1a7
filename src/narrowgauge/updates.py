"""An update: whether the gradients are sound, and the steps of the optimizers that have something to step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.errors import UsageError
from narrowgauge.optim import AdamW
from narrowgauge.optim.fused_adamw_patch import own_kernel
from narrowgauge.optim.norms import gradient_norms, total_norm
from narrowgauge.optim.sharded import local
from narrowgauge.ranks.accord import Accord
from narrowgauge.scaling.tensor import TensorScales


@dataclass(frozen=True)
class GradientCheck:
    """What is known of an update's gradients, on the device."""

    norm: Tensor
    """Of all gradients together, as they are: scaled, and before clipping."""
    found: Tensor
    """Whether anything was inf or NaN, so that the update must be skipped."""
    bad: Tensor
    """The same for each gradient, and for each tensor that was cast to FP8."""
    names: list[str]
    """Of what ``bad`` tells."""


def check_gradients(
    accord: Accord,
    named: Mapping[str, nn.Parameter],
    released: Mapping[nn.Parameter, Tensor],
    scales: TensorScales | None,
    device: torch.device,
) -> GradientCheck:
    """Norms of all gradients over all ranks, and whether they and what was cast to FP8 are finite."""
    accord.settle_gradients(named)
    norms = accord.combine(gradient_norms(named.values(), released, device), named)
    total = total_norm(norms)
    bad, names = ~torch.isfinite(norms), list(named)
    if scales is not None:
        accord.agree(scales)
        bad, names = torch.cat([bad, scales.misfits()]), [*names, *scales.names]
    found = ~torch.isfinite(total) | bad.any()
    # What a cast has saturated looked finite to the norm.
    return GradientCheck(torch.where(found & torch.isfinite(total), torch.inf, total), found, bad, names)


def parameters_of(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """All parameters of some optimizers."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]


def with_gradients(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """The optimizers that have something to step: a part of the model that was not used this time is left alone."""
    chosen = []
    for optimizer in optimizers:
        if any(parameter.grad is not None for parameter in parameters_of([optimizer])):
            chosen.append(optimizer)
        else:  # its scheduler would warn that it was never stepped
            optimizer._opt_called = True  # type: ignore[attr-defined]
    return chosen


ALTERNATING = (
    "engine.step steps all optimizers, as all have gradients; in an earlier step some had none. Where parts are "
    "trained in turn, as in a GAN, name the one to step: engine.step(optimizer)"
)


class Turns:
    """Which of an engine's optimizers an update steps; says so where they seem to be trained in turn, unnamed."""

    def __init__(self) -> None:
        self._alternating = False

    def choose(self, optimizers: list[Optimizer], named: Sequence[Optimizer], released: bool) -> list[Optimizer]:
        """Those named, or those that have gradients; all where gradients were ``released``."""
        if named or released or len(optimizers) == 1:
            return list(named) or optimizers
        chosen = with_gradients(optimizers)
        if len(chosen) < len(optimizers):
            self._alternating = True
        elif self._alternating:
            self._alternating = False
            warnings.warn(ALTERNATING, stacklevel=6)
        return chosen


def step_optimizers(optimizers: Sequence[Optimizer], factor: Tensor | None, found: Tensor, sharded: bool) -> None:
    """Step each with gradients / factor, unless ``found``.

    Fused optimizers take both as tensors and decide on the device. Others cost one wait, and are not called at all
    where the update is skipped.
    """
    skip: bool | None = None
    for optimizer in optimizers:
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if fused and (isinstance(optimizer, AdamW) or not sharded):
            optimizer.grad_scale, optimizer.found_inf = factor, found.float()  # type: ignore[attr-defined]
            try:
                with own_kernel():
                    optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            continue
        skip = bool(found.item()) if skip is None else skip
        if skip:
            # A scheduler would otherwise warn that it was stepped before its optimizer.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            continue
        if factor is not None:
            _divide([p.grad for p in parameters_of([optimizer]) if p.grad is not None], factor)
        optimizer.step()


def _divide(grads: list[Tensor], factor: Tensor) -> None:
    own = [local(grad) for grad in grads]
    values = [grad._values() if grad.is_sparse else grad for grad in own]
    if values:
        torch._foreach_mul_(values, factor.reciprocal())


def check_steps_once(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that evaluate the loss several times in a step."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "Engine: LBFGS evaluates the loss several times in a step, by a closure, which an engine's step has "
                "not; train with it in plain torch (FP32), or take another optimizer"
            )
