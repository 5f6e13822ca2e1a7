"""Baselines of a benchmark: the same training step in plain PyTorch or torchao, written as their documentation advises.

A baseline trains the same model on the same data with the same optimizers and clipping. The plain PyTorch baseline of
FP8 is BF16: that is what a user would run without narrowgauge. The command-line option for baselines is ``--peers``.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.errors import UsageError
from narrowgauge.recipe import Recipe
from narrowgauge.task import Task

Step = Callable[[Any], Tensor]
"""One training step on a batch that is already on the device; returns the loss."""


class Baseline(NamedTuple):
    """A baseline: its compute format, and a function that makes its training step."""

    compute: str
    make: Callable[[Task, nn.Module, list[Optimizer], float, bool], Step]


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def make_baselines(peer: str, recipe: Recipe) -> dict[str, Baseline]:
    """The baselines of a library for a recipe, by name; empty if it has no counterpart.

    Args:
        peer: The library: "torch" or "torchao".
        recipe: The recipe to compare with.

    Raises:
        UsageError: If the library is unknown or not installed.
    """
    if peer == "torch":
        compute = "bf16" if recipe.compute == "fp8" else recipe.compute
        return {f"torch-{compute}": Baseline(compute, functools.partial(torch_loop, compute))}
    if peer == "torchao":
        if recipe.compute != "fp8":
            return {}
        if importlib.util.find_spec("torchao") is None:
            raise UsageError("--peers torchao: it is not installed; pip install torchao, or leave it out")
        names = ("tensorwise", "rowwise")
        return {f"torchao-{name}": Baseline("fp8", functools.partial(torchao_loop, name)) for name in names}
    raise UsageError(f"unknown baseline {peer!r} in --peers: expected torch or torchao")


def torch_loop(
    compute: str, task: Task, model: nn.Module, optimizers: list[Optimizer], clip_norm: float, compile: bool
) -> Step:
    """Plain PyTorch: autocast, GradScaler for FP16, clip_grad_norm_, the optimizer's own step."""
    device = next(model.parameters()).device.type
    dtype = DTYPES.get(compute)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    if compile:
        model.compile()
    matmul = torch.backends.cuda.matmul

    def step(batch: Any) -> Tensor:
        matmul.fp32_precision = "tf32" if compute == "tf32" else "ieee"
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            loss = task.loss(model, batch)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def torchao_loop(
    name: str, task: Task, model: nn.Module, optimizers: list[Optimizer], clip_norm: float, compile: bool
) -> Step:
    """torchao's FP8 training in the BF16 loop: as its documentation advises, all linear layers but the head.

    Layers whose sizes are not multiples of 16 cannot run in FP8 and are left out.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(name)
    get_head = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()

    def converts(module: nn.Module, path: str) -> bool:
        fits = isinstance(module, nn.Linear) and module.in_features % 16 == module.out_features % 16 == 0
        return fits and module is not head and "lm_head" not in path

    convert_to_float8_training(model, config=config, module_filter_fn=converts)
    return torch_loop("bf16", task, model, optimizers, clip_norm, compile)
