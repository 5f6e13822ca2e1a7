"""The optimizers that a run may have, by name, with their groups of parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from narrowgauge.errors import UsageError
from narrowgauge.optim import Muon, split_for_muon
from narrowgauge.runs.settings import OPTIMIZERS
from narrowgauge.task import Task, make_own_optimizers

UNREAD = {
    "muon": ("betas",),
    "adamw": ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn"),
}
"""Settings of Muon's groups that the other rule reads."""


def with_optimizer(task: Task, name: str) -> Task:
    """Return the task with an optimizer of this name; ``adamw`` is what a task without its own optimizer has."""
    if name not in OPTIMIZERS:
        raise UsageError(f"--optimizer {name}: expected {' or '.join(OPTIMIZERS)}")
    if name == OPTIMIZERS[0]:
        return task
    if task.optimizer is not None:
        raise UsageError(f"--optimizer {name}: task {task.name} makes its own optimizer; change it there")
    return dataclasses.replace(task, optimizer=functools.partial(make_muon, weight_decay=task.weight_decay))


def describe_optimizers(optimizers: Iterable[Optimizer]) -> list[str]:
    """Describe each parameter group in a line: optimizer, rule, parameters, and settings that are not None or False.

    Of a group with a rule, only the settings that its rule reads are listed.
    """
    lines = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            count = sum(parameter.numel() for parameter in group["params"])
            other = UNREAD.get(group.get("rule", ""), ())
            settings = [
                name if value is True else f"{name} {value}"
                for name, value in group.items()
                if name not in ("params", "rule", "initial_lr", "lr", *other)
                and isinstance(value, str | int | float | tuple)
                and value is not False
            ]
            rule = f" ({group['rule']})" if "rule" in group else ""
            lines.append(f"{type(optimizer).__name__}{rule}, {count:,} parameters: {', '.join(settings)}")
    return lines


def make_optimizers(task: Task, model: nn.Module, learning_rate: float) -> list[Optimizer]:
    """Make the task's own optimizers, or AdamW."""
    own = make_own_optimizers(task, model, learning_rate)
    return own or [make_adamw(model, learning_rate, task.weight_decay)]


def make_muon(model: nn.Module, learning_rate: float, weight_decay: float) -> Muon:
    """Make a Muon for the matrices of a model's blocks, with AdamW's rule for the rest and for AdamW's rates."""
    groups = split_for_muon(model)
    if all(group["rule"] != "muon" for group in groups):
        raise UsageError("--optimizer muon: the model has no matrices for Muon, such as those of blocks; use adamw")
    return Muon(groups, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")


def make_adamw(model: nn.Module, learning_rate: float, weight_decay: float) -> AdamW:
    """Make an AdamW that decays only matrices: norms, biases and other vectors have no redundancy to remove."""
    trained = [p for p in model.parameters() if p.requires_grad]  # parameters() yields a tied weight once
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=_can_fuse(trained))


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    if "fused" not in inspect.signature(AdamW).parameters:
        return False
    return all(p.device.type in ("cuda", "cpu") and torch.is_floating_point(p) for p in parameters)
