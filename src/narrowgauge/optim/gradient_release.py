"""Gradient release: each parameter is stepped as soon as backward has its gradient, which is then freed.

So the gradients of a model never exist at once. What needs them all at once cannot be had with it: clipping by their
norm, accumulation over microbatches, a loss scale that is checked before anything is stepped. A gradient that is not
finite is not stepped, nor are those that backward brings after it; those before it were sound, and have been.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.kernels.adamw import compute_norms
from narrowgauge.optim.adamw import AdamW
from narrowgauge.optim.norms import view_real
from narrowgauge.optim.sharded import check_gradients
from narrowgauge.scaling.tensor import TensorScales

_HANDLE = "release_handle"


class GradientRelease:
    """Hooks on the parameters of some optimizers, and the norms of the gradients that they have seen."""

    def __init__(self, optimizers: Iterable[AdamW], scales: TensorScales | None = None) -> None:
        """``scales``: of FP8 casts, which saturate: what they were given is asked for as well."""
        self._optimizers, self._scales = list(optimizers), scales
        self._owner: dict[nn.Parameter, tuple[AdamW, dict[str, Any]]] = {}
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._found: dict[torch.device, Tensor] = {}
        self._handles: dict[nn.Parameter, Any] = {}
        self.attach()
        for optimizer in self._optimizers:
            optimizer.release = self  # type: ignore[attr-defined]

    def attach(self) -> None:
        """Put hooks on parameters that have none yet: those of a frozen part come when it is trained."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                self._add(optimizer, group)

    def add(self, optimizer: AdamW, group: dict[str, Any]) -> None:
        """Release the gradients of a group that was added, unless another engine keeps this one's gradients."""
        if any(parameter.__dict__.get(_HANDLE) is handle for parameter, handle in self._handles.items()):
            self._add(optimizer, group)

    def _add(self, optimizer: AdamW, group: dict[str, Any]) -> None:
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
                "and call backward once, or take gradients=bf16"
            )
        optimizer, group = self._owner[parameter]
        if parameter.grad.is_sparse:
            raise UsageError("gradients=released: a gradient is sparse; use dense embeddings, or gradients=fp32")
        (norm,) = compute_norms([view_real(parameter.grad)])
        bad = (~torch.isfinite(norm)).float()
        if self._scales is not None:
            bad = torch.maximum(bad, self._scales.misfits().any().float().to(bad.device))
        before = self._found.get(parameter.device)
        found = bad if before is None else torch.maximum(before, bad)
        self._found[parameter.device], self._norms[parameter] = found, norm.float()
        optimizer.step_parameters([parameter], group, None, found)
        parameter.grad = None

    def take(self) -> dict[nn.Parameter, Tensor]:
        """The norms of the gradients stepped since the last call."""
        norms, self._norms, self._found = self._norms, {}, {}
        return norms


def check_released(clip_norm: float | None, accumulate: int) -> None:
    """Refuse what needs all gradients at once."""
    for name, value, good in (
        ("clip_norm", clip_norm, clip_norm is None),
        ("accumulate", accumulate, accumulate == 1),
    ):
        flag = " (--clip 0)" if name == "clip_norm" else ""
        if not good:
            raise UsageError(
                f"Engine: {name}={value} needs all gradients at once, and gradients=released frees each during "
                f"backward; leave {name} out{flag}, or take gradients=bf16"
            )


def keep_gradient(parameter: Tensor) -> None:
    """Let a parameter keep its gradients again."""
    handle = parameter.__dict__.pop(_HANDLE, None)
    if handle is not None:
        handle.remove()
