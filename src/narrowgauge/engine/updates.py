"""One update: the check of the gradients, and the steps of the optimizers that have gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.device_readback import Readback
from narrowgauge.optim.fused_adamw_patch import patch_fused_adamw
from narrowgauge.optim.mastered import MasteredOptimizer, can
from narrowgauge.optim.norms import compute_total_norm
from narrowgauge.optim.sharded import to_local
from narrowgauge.ranks.update_sync import UpdateSync
from narrowgauge.scaling.tensor import TensorScales


@dataclass(frozen=True)
class GradientCheck:
    """The check of an update's gradients, as tensors on the device."""

    norm: Tensor
    """Norm of all gradients together: still scaled, and before clipping."""
    found: Tensor
    """Whether anything was inf or NaN, so that the update must be skipped."""
    bad: Tensor
    """The same for each gradient, and for each tensor that was cast to FP8."""
    names: list[str]
    """Names for the elements of ``bad``."""


@dataclass(frozen=True)
class Update:
    """What an update has computed on the device."""

    check: GradientCheck
    grad_norm: Tensor
    """The norm of all gradients, unscaled."""
    scale: Tensor
    """The loss scale."""
    stepped: list[Optimizer]


def check_norms(
    norms: Tensor, named: Mapping[str, nn.Parameter], scales: TensorScales | None, update_sync: UpdateSync
) -> GradientCheck:
    """Combine the gradient norms of all ranks, and check that they and all tensors cast to FP8 are finite.

    Args:
        norms: The norm of each gradient (or of its shard) on this rank.
        named: The parameters of the gradients, by name.
        scales: The FP8 scales, which know the largest value of each tensor that was cast.
        update_sync: The ranks.
    """
    norms = update_sync.combine_norms(norms, named)
    total = compute_total_norm(norms)
    bad, names = ~torch.isfinite(norms), list(named)
    if scales is not None:
        update_sync.sync_amax(scales)
        bad, names = torch.cat([bad, scales.find_nonfinite()]), [*names, *scales.names]
    found = ~torch.isfinite(total) | bad.any()
    # A cast to FP8 saturates: what was inf before it is finite in the norm.
    return GradientCheck(torch.where(found & torch.isfinite(total), torch.inf, total), found, bad, names)


def list_parameters(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return all parameters of some optimizers."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]


def select_with_gradients(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that have a gradient to step with: parts of the model may be unused in a step."""
    selected = []
    for optimizer in optimizers:
        if any(parameter.grad is not None for parameter in list_parameters([optimizer])):
            selected.append(optimizer)
        else:  # otherwise its scheduler would warn that it was never stepped
            optimizer._opt_called = True  # type: ignore[attr-defined]
    return selected


ALTERNATING = (
    "engine.step steps all optimizers, because all have gradients; in an earlier step some had none. If parts of the "
    "model are trained in turn, as in a GAN, pass the optimizer to step: engine.step(optimizer)"
)


REWRITTEN = (
    "split master weights: other code (a mask, a clamp) has rewritten weights before each of the last {count} updates. "
    "Each time the lower 16 bits of the weights around them were dropped, so small updates are lost; use master=fp32"
)
REWRITES = 20
"""Consecutive updates with rewritten weights before the engine warns: a pruning schedule rewrites less often."""


class Stepper:
    """Steps an engine's optimizers, and warns once about two habits that lose updates."""

    def __init__(self) -> None:
        self._alternating = False
        self._rewrites = 0.0
        self._streak = 0
        self._readback = Readback()

    def select(self, optimizers: list[Optimizer], chosen: Sequence[Optimizer], released: bool) -> list[Optimizer]:
        """Return the optimizers to step: those ``chosen``, or those with gradients; all if gradients were released."""
        if chosen or released or len(optimizers) == 1:
            return list(chosen) or optimizers
        selected = select_with_gradients(optimizers)
        if len(selected) < len(optimizers):
            self._alternating = True
        elif self._alternating:
            self._alternating = False
            warnings.warn(ALTERNATING, stacklevel=6)
        return selected

    def step(self, optimizers: Sequence[Optimizer], factor: Tensor | None, found: Tensor, sharded: bool) -> None:
        """Step each optimizer with gradients / factor, unless ``found``.

        Fused optimizers take both as tensors and decide on the device. Other optimizers wait for the device once, and
        are not called if the update is skipped.
        """
        skip: bool | None = None
        for optimizer in optimizers:
            fused = getattr(optimizer, "_step_supports_amp_scaling", False)
            if fused and (not sharded or can(optimizer, "shards")):
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
                _divide([p.grad for p in list_parameters([optimizer]) if p.grad is not None], factor)
            optimizer.step()
        torch.clear_autocast_cache()  # inside of engine.forward() it has 16-bit copies of the old weights

    def count_rewrites(self, optimizers: Sequence[Optimizer]) -> None:
        """Warn once if weights with split masters are rewritten before every update, without waiting for the device."""
        able = [cast(MasteredOptimizer, one) for one in optimizers if can(one, "masters")]
        own = [one for one in able if one.has_split_masters]
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
