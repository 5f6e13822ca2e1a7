"""Measures attention logits, which fused attention never stores: from a sample of queries of the first sequence.

Softmax does not depend on a constant in a row, so what counts is how far the largest logit is above the row's mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_QUERIES = 64
_MIN_KEYS = 4
_MASKED = -5e3
"""Logits below this are masked out."""


def measure_softmax(logits: Tensor, args: Any, kwargs: Any) -> Tensor | None:
    """Measure the input of a softmax over the last of three or more dimensions, as attention has; otherwise None."""
    dimension = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if logits.dim() < 3 or dimension not in (-1, logits.dim() - 1) or logits.shape[-1] < _MIN_KEYS:
        return None
    return _measure_rows(logits.detach()[0].float())


def measure_attention(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, scale: float | None = None, **__: Any
) -> Tensor | None:
    """Measure the logits of ``F.scaled_dot_product_attention``, before its mask."""
    if query.dim() < 3 or key.shape[-2] < _MIN_KEYS or query.shape[-1] != key.shape[-1]:
        return None
    query, key = query.detach()[0].float(), key.detach()[0].float()
    if query.dim() == 3 and query.shape[0] != key.shape[0]:  # grouped queries
        key = key.repeat_interleave(query.shape[0] // key.shape[0], 0)
    logits = query[..., :: max(query.shape[-2] // _QUERIES, 1), :] @ key.transpose(-1, -2)
    return _measure_rows(logits * (query.shape[-1] ** -0.5 if scale is None else scale))


def measure_packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    weight: Tensor | None,
    bias: Tensor | None,
    *_: Any,
    **__: Any,
) -> Tensor | None:
    """Measure the logits of nn.MultiheadAttention, whose arguments are (length, batch, width)."""
    if weight is None or query.dim() != 3:
        return None
    parts = []
    for index, sequence in enumerate((query, key)):
        rows = slice(index * width, (index + 1) * width)
        part = torch.nn.functional.linear(
            sequence.detach()[:, 0].float(), weight.detach()[rows].float(), None if bias is None else bias[rows].float()
        )
        parts.append(part.unflatten(-1, (heads, -1)).transpose(0, 1)[None])
    return measure_attention(parts[0], parts[1], parts[1])


def _measure_rows(logits: Tensor) -> Tensor:
    visible = (logits > _MASKED) & logits.isfinite()
    mean = torch.where(visible, logits, 0).sum(-1) / visible.sum(-1).clamp(min=1)
    return (torch.where(visible, logits, -torch.inf).amax(-1) - mean).nan_to_num(0.0, 0.0, 0.0).amax()
