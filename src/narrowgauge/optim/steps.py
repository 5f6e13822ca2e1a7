"""How many steps optimizers have taken in this process, whoever took them.

A tensor's version tells of every change in place but those of fused optimizers (torch 2.13: fused AdamW leaves it at
0), so any optimizer's step, wherever it is taken, makes copies of weights old. Whether versions show steps is noted, to
tell a step from a change by other hands.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_taken = 0
_shows = False
_version_before: tuple[Tensor, int] | None = None


def taken() -> int:
    """Steps that are over; within a step, those before it."""
    return _taken


def show_in_versions() -> bool:
    """Whether the last step was one that raised its weights' versions."""
    return _shows


def _note_before(optimizer: torch.optim.Optimizer, *_: object) -> None:
    global _version_before
    weight = next((p for group in optimizer.param_groups for p in group["params"] if p.grad is not None), None)
    _version_before = None if weight is None else (weight, weight._version)


def _note_after(*_: object) -> None:
    global _taken, _shows, _version_before
    _taken += 1
    if _version_before is not None:
        weight, version = _version_before
        _shows, _version_before = weight._version != version, None


register_optimizer_step_pre_hook(_note_before)
register_optimizer_step_post_hook(_note_after)
