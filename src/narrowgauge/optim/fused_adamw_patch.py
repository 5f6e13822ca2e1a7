"""Runs torch's fused AdamW with narrowgauge's kernel; the user's optimizer, its state and its hooks do not change.

torch's kernel divides gradients by ``grad_scale`` and writes them back, 4 of 32 bytes per parameter. Ours does not
write gradients, and is faster per byte (docs/results.md). Cases that it does not support (amsgrad, other formats,
DTensors, lists over several devices) run in torch's kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels import use_triton
from narrowgauge.kernels.adamw import Lists, Numbers, adamw
from narrowgauge.optim.multi_tensor_step import compute_step_rates


@contextlib.contextmanager
def patch_fused_adamw() -> Iterator[None]:
    """Context manager that replaces ``torch._fused_adamw_``, which torch's optimizers look up at each step."""
    plain = torch._fused_adamw_

    def step(params: list[Tensor], *lists: list[Tensor], **numbers: Any) -> None:
        _step(plain, params, *lists, **numbers)

    names: Any = torch
    names._fused_adamw_ = step
    try:
        yield
    finally:
        names._fused_adamw_ = plain


def _step(
    plain: Callable[..., None],
    params: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    largest: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float | Tensor,
    beta1: Any,
    beta2: Any,
    eps: float,
    weight_decay: float,
    maximize: bool,
    amsgrad: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Replace ``torch._fused_adamw_``; ``steps`` already count this update."""
    plain_numbers = isinstance(beta1, float) and isinstance(beta2, float) and not amsgrad
    if not (plain_numbers and use_triton(params[0]) and all(map(_fits, params, grads, first, second))):
        plain(
            params, grads, first, second, largest, steps, lr=lr, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, maximize=maximize, amsgrad=amsgrad, grad_scale=grad_scale, found_inf=found_inf,
        )  # fmt: skip
        return
    rates = compute_step_rates(torch.stack(steps), lr, weight_decay, beta1, beta2)
    lists = Lists(*([tensor.detach() for tensor in column] for column in (params, grads, first, second)))
    adamw(lists, Numbers(beta1, beta2, eps, maximize, rates, None, None, grad_scale, found_inf))


def _fits(*tensors: Tensor) -> bool:
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.dtype is torch.float32
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and tensor.device == tensors[0].device
        for tensor in tensors
    )
