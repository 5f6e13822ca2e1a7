"""Gradient release: backward steps each parameter as soon as its gradient is complete, and frees the gradient.

All gradients of a model never exist at once. So features that need all of them are not available: clipping by norm,
accumulation over microbatches, and a loss scale that is checked before any step. A non-finite gradient is not applied,
nor are those computed after it. Those before it were finite and have been applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.kernels.adamw import compute_norms
from narrowgauge.optim.mastered import MasteredOptimizer
from narrowgauge.optim.norms import view_real
from narrowgauge.optim.sharded import check_gradients
from narrowgauge.scaling.tensor import TensorScales

_HANDLE = "release_handle"


class GradientRelease:
    """Hooks that step the parameters of optimizers during backward, and record the norms of their gradients."""

    def __init__(self, optimizers: Iterable[MasteredOptimizer], scales: TensorScales | None = None) -> None:
        """``scales``: the FP8 scales. Casts saturate, so their inputs are checked for non-finite values as well."""
        self._optimizers, self._scales = list(optimizers), scales
        self._owner: dict[nn.Parameter, tuple[MasteredOptimizer, dict[str, Any]]] = {}
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._found: dict[torch.device, Tensor] = {}
        self._handles: dict[nn.Parameter, Any] = {}
        self.attach()
        for optimizer in self._optimizers:
            optimizer.release = self  # type: ignore[attr-defined]

    def attach(self) -> None:
        """Add hooks to parameters without one, such as those that were frozen before."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                self._add(optimizer, group)

    def add(self, optimizer: MasteredOptimizer, group: dict[str, Any]) -> None:
        """Release the gradients of an added group, unless another engine has taken these parameters over."""
        if any(parameter.__dict__.get(_HANDLE) is handle for parameter, handle in self._handles.items()):
            self._add(optimizer, group)

    def _add(self, optimizer: MasteredOptimizer, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if not parameter.requires_grad or parameter in self._owner:
                continue
            check_gradients(parameter, "released")
            keep_gradient(parameter)
            self._owner[parameter] = optimizer, group
            self._handles[parameter] = handle = parameter.register_post_accumulate_grad_hook(self._step)
            setattr(parameter, _HANDLE, handle)

    @torch.no_grad()
    def _step(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        if parameter in self._norms:
            raise UsageError(
                "gradients=released: a second backward before engine.step would step parameters twice; add the losses "
                "and call backward once, or use gradients=bf16"
            )
        optimizer, group = self._owner[parameter]
        if parameter.grad.is_sparse:
            raise UsageError("gradients=released: a gradient is sparse; use dense embeddings, or gradients=fp32")
        (norm,) = compute_norms([view_real(parameter.grad)])
        bad = (~torch.isfinite(norm)).float()
        if self._scales is not None:
            bad = torch.maximum(bad, self._scales.find_nonfinite().any().float().to(bad.device))
        before = self._found.get(parameter.device)
        found = bad if before is None else torch.maximum(before, bad)
        self._found[parameter.device], self._norms[parameter] = found, norm.float()
        optimizer.step_parameters([parameter], group, None, found)
        parameter.grad = None

    def take(self) -> dict[nn.Parameter, Tensor]:
        """Return the norms of the gradients applied since the last call, and reset them."""
        norms, self._norms, self._found = self._norms, {}, {}
        return norms


def check_released(clip_norm: float | None, accumulate: int) -> None:
    """Raise UsageError for options that need all gradients at once."""
    for name, value, good in (
        ("clip_norm", clip_norm, clip_norm is None),
        ("accumulate", accumulate, accumulate == 1),
    ):
        flag = " (--clip 0)" if name == "clip_norm" else ""
        if not good:
            raise UsageError(
                f"Engine: {name}={value} needs all gradients at once, and gradients=released frees each during "
                f"backward; remove {name}{flag}, or use gradients=bf16"
            )


def keep_gradient(parameter: Tensor) -> None:
    """Remove a parameter's hook, so that it keeps its gradient."""
    handle = parameter.__dict__.pop(_HANDLE, None)
    if handle is not None:
        handle.remove()
