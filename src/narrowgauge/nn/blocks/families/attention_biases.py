"""Blocks of transformers that take a bias of attention's scores: BLOOM's alibi, T5's position bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks.example import Example, list_head_counts, read_signature


def make_examples(block: nn.Module, x: Tensor) -> list[Example] | None:
    """Return calls to try, or None for blocks with other arguments."""
    required, optional = read_signature(block)
    names = [*required, *optional]
    others: dict[str, Any] = {other: None for other in required[1:] if other in ("attention_mask", "position_ids")}
    rows, length, _ = x.shape
    for heads in list_head_counts(block):
        for name, shape in (("alibi", (rows * heads, 1, length)), ("position_bias", (1, heads, length, length))):
            if name in names:
                bias = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(x.device)
                return [Example((x,), {**others, name: bias})]
    return None
