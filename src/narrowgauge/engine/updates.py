"""An update: whether the gradients are sound, and the steps of the optimizers that have something to step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.device_readback import Readback
from narrowgauge.errors import UsageError
from narrowgauge.optim import AdamW
from narrowgauge.optim.fused_adamw_patch import patch_fused_adamw
from narrowgauge.optim.norms import compute_grad_norms, compute_total_norm
from narrowgauge.optim.sharded import to_local
from narrowgauge.ranks.update_sync import UpdateSync
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
    update_sync: UpdateSync,
    named: Mapping[str, nn.Parameter],
    released: Mapping[nn.Parameter, Tensor],
    scales: TensorScales | None,
    device: torch.device,
) -> GradientCheck:
    """Norms of all gradients over all ranks, and whether they and what was cast to FP8 are finite."""
    update_sync.settle_gradients(named)
    norms = update_sync.combine(compute_grad_norms(named.values(), released, device), named)
    total = compute_total_norm(norms)
    bad, names = ~torch.isfinite(norms), list(named)
    if scales is not None:
        update_sync.agree(scales)
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


REWRITTEN = (
    "split masters: other code has rewritten weights before each of the last {count} updates (a mask, a clamp), and "
    "each time the lower 16 bits of the weights around them were dropped, so that small updates are lost; take "
    "master=fp32"
)
REWRITES = 20
"""Updates in a row that find rewritten weights before the engine says so: a schedule of pruning has fewer."""


class Stepper:
    """Steps an engine's optimizers, and remembers what is worth a warning."""

    def __init__(self) -> None:
        self._alternating = False
        self._rewrites = 0.0
        self._streak = 0
        self._readback = Readback()

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

    def step(self, optimizers: Sequence[Optimizer], factor: Tensor | None, found: Tensor, sharded: bool) -> None:
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
                    with patch_fused_adamw():
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
        self._count_rewrites(optimizers)

    def _count_rewrites(self, optimizers: Sequence[Optimizer]) -> None:
        """Say so once where weights with split masters are rewritten before every update; nothing waits for it."""
        own = [one for one in optimizers if isinstance(one, AdamW) and one.has_split_masters]
        if not own or self._streak >= REWRITES:
            return
        self._readback.push(None, {"count": torch.stack([one.foreign_writes.double() for one in own]).sum()})
        for _, values in self._readback.ready():
            self._streak = self._streak + 1 if values["count"] > self._rewrites else 0
            self._rewrites = values["count"]
            if self._streak == REWRITES:
                warnings.warn(REWRITTEN.format(count=REWRITES), stacklevel=6)
                return


def _divide(grads: list[Tensor], factor: Tensor) -> None:
    own = [to_local(grad) for grad in grads]
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
