"""Blocks with nn.MultiheadAttention whose hidden state is [T, B, D]: nn.TransformerEncoderLayer by default."""

from __future__ import annotations

from torch import Tensor, nn

from narrowgauge.nn.blocks.example import Example, read_signature
from narrowgauge.nn.blocks.multihead import is_batch_first


def make_examples(block: nn.Module, x: Tensor) -> list[Example] | None:
    """Return a call with the hidden state turned, or None for other blocks."""
    if is_batch_first(block) or len(read_signature(block).required) > 1:
        return None
    return [Example((x.transpose(0, 1).contiguous(),), {})]
