"""The other side of a benchmark: the same training step, written by hand as its own documentation would have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.errors import UsageError
from narrowgauge.recipe import Recipe
from narrowgauge.task import Task

Step = Callable[[Any], Tensor]
"""One training step on a batch that is already on the device; returns the loss."""

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def torch_loop(
    task: Task, model: nn.Module, optimizer: Optimizer, recipe: Recipe, clip_norm: float, compile: bool
) -> Step:
    """Plain PyTorch: autocast, GradScaler for FP16, clip_grad_norm_, the optimizer's own step."""
    device = next(model.parameters()).device.type
    dtype = DTYPES.get(recipe.compute)
    if recipe.compute == "fp8":
        raise UsageError("peer torch: plain PyTorch has no FP8 training; its twin of fp8 is bf16")
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    if compile:
        model.compile()
    matmul = torch.backends.cuda.matmul

    def step(batch: Any) -> Tensor:
        matmul.fp32_precision = "tf32" if recipe.compute == "tf32" else "ieee"
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            loss = task.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


PEERS: dict[str, Callable[[Task, nn.Module, Optimizer, Recipe, float, bool], Step]] = {"torch": torch_loop}
