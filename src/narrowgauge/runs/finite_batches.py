"""Refuses batches that hold NaN or infinity, except for masks.

A float mask is added to scores, and softmax turns its -inf into 0. A tensor of a batch counts as a mask if it has
neither NaN nor +inf, at least one finite value, and
    all its finite values are 0, or
    its name (the key of a dict, the field of a named tuple) contains "mask" or "bias".
The name is needed for masks with other values, because data with logarithms of 0 also consists of -inf and numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.runs.atomic_files import RESUME

MASK_NAMES = ("mask", "bias")


class BadData(UsageError):
    """The task made a batch that cannot be trained on."""

    batch: Any = None
    """The training batch that is not finite, so that it can be captured."""


def check_finite(batch: Any, where: str, name: str, key: str = "") -> None:
    """Raise BadData if a batch holds NaN or infinity, which no precision can train on. Masks may hold -inf.

    Args:
        batch: Tensors in dicts, lists and tuples.
        where: What the batch is for, for the error message.
        name: Name of the batch or of a part of it, for the error message.
        key: The key or field under which the batch contains this part.
    """
    if isinstance(batch, Tensor):
        if batch.is_floating_point() and not bool(torch.isfinite(batch).all()) and not is_mask(batch, key):
            broken = int((~torch.isfinite(batch)).sum())
            raise BadData(
                f"data of {where} is not finite: {name} (shape {tuple(batch.shape)}) holds {broken} NaN or "
                f"infinite values; fix the data, then train again or {RESUME}"
            )
    elif isinstance(batch, dict):
        for inner, item in batch.items():
            check_finite(item, where, f"{name}[{inner!r}]", str(inner))
    elif isinstance(batch, list | tuple):
        fields = getattr(batch, "_fields", None) or [key] * len(batch)
        for index, (inner, item) in enumerate(zip(fields, batch, strict=True)):
            check_finite(item, where, f"{name}[{index}]", inner)


def is_mask(tensor: Tensor, key: str) -> bool:
    """Whether a tensor with values that are not finite is a mask of -inf."""
    finite = torch.isfinite(tensor)
    if not bool((finite | (tensor == -torch.inf)).all()) or not bool(finite.any()):
        return False
    return any(word in key.lower() for word in MASK_NAMES) or not bool(tensor[finite].any())
