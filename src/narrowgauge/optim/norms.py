"""The norm of each gradient, in one pass over all gradients that share a device and a format."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from narrowgauge.kernels.adamw import compute_norms
from narrowgauge.optim.sharded import to_local
from narrowgauge.parameters import is_sharded


def compute_grad_norms(
    parameters: Collection[nn.Parameter], released: Mapping[nn.Parameter, Tensor], device: torch.device
) -> Tensor:
    """Return the norms of the parameters' gradients, in order; 0 without a gradient; of a shard only the local part.

    ``released`` has the norms of gradients that were applied and freed during backward.
    """
    zero = torch.zeros((), device=device)
    norms = [released.get(parameter, zero).to(device) for parameter in parameters] if released else []
    norms = norms or [zero] * len(parameters)
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None:
            values = _get_values(parameter)
            if values.numel():
                alike.setdefault((values.device, values.dtype), []).append((index, values))
    for indexed in alike.values():
        for (index, _), norm in zip(indexed, compute_norms([g for _, g in indexed]), strict=True):
            norms[index] = norm.to(device, torch.float32, non_blocking=True)
    return torch.stack(norms)


def compute_total_norm(norms: Tensor) -> Tensor:
    """Return the total norm in FP32, computed in FP64: FP32 squares overflow at 1.8e19 and underflow at 1e-23."""
    total: Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    return total.float()


def view_real(grad: Tensor) -> Tensor:
    """Return a gradient; a complex one as its real and imaginary parts, which have the same norm."""
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def _get_values(parameter: nn.Parameter) -> Tensor:
    """Return the local values of a parameter's gradient."""
    grad = parameter.grad
    assert grad is not None
    if is_sharded(grad) and is_sharded(parameter) and grad.placements != parameter.placements:
        # Under tensor parallelism it may be a partial sum.
        grad = parameter.grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    if grad.is_sparse:
        grad = parameter.grad = grad.coalesce()
        return view_real(grad._values())
    return view_real(to_local(grad))
